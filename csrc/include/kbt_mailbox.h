/* kbt_mailbox.h - one head learns, another one predicts with what it learned. C99, no heap, no lock.
 *
 * One thread learns and posts after an update; another thread takes the newest post and predicts with its own head.
 * There is one mailbox per reader. It holds three copies of the learned numbers: one that the learner writes, one that
 * the reader uses, and one in between that changes hands by a single atomic exchange. So
 *  - neither side ever waits or retries;
 *  - the reader sees the posterior after a whole update, never half of one;
 *  - posting costs one copy of the learned numbers, taking costs none.
 *
 * The reader's head works directly on the copy that it has taken: only one head may take from a mailbox, and the
 * mailbox must live as long as that head.
 *
 * It also works between the main loop and an interrupt of a microcontroller with atomic exchange (Cortex-M3 and up).
 */
#ifndef KBT_MAILBOX_H
#define KBT_MAILBOX_H

#include "kbt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kbt_mailbox kbt_mailbox;

/* Bytes of memory for a mailbox between heads of this one's configuration; 0 for NULL. */
KBT_API size_t kbt_mailbox_bytes(const kbt_head *head);
/* Lay a mailbox out in `memory`, aligned to KBT_ARENA_ALIGN, and post what `head` knows now. The mailbox lives as long
 * as the memory; it keeps no pointer to the head of the learner, which may go before it. */
KBT_API kbt_status kbt_mailbox_init(const kbt_head *head, void *memory, size_t bytes, kbt_mailbox **mailbox);
/* By the learner, after what it has learned. What was posted before and not taken is replaced. */
KBT_API kbt_status kbt_post(const kbt_head *head, kbt_mailbox *mailbox);
/* By the reader, before it predicts: bring `head` to the newest post. A prediction waiting to be observed is dropped if
 * there was one to take. KBT_E_CONFIG, here and in kbt_post: the head has another configuration than the mailbox. */
KBT_API kbt_status kbt_take(kbt_head *head, kbt_mailbox *mailbox);

#ifdef __cplusplus
}
#endif

#endif /* KBT_MAILBOX_H */
