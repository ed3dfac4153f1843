/* kbt_mailbox.h - one head learns, another predicts with the result. C99, no heap, no lock.
 *
 * One thread learns and posts after an update; another thread takes the newest post and predicts with its own head.
 * There is one mailbox per reader. It holds three copies of the learned numbers: one that the learner writes, one that
 * the reader uses, and one in between, swapped by a single atomic exchange:
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
 * as the memory; it keeps no pointer to the learner's head. */
KBT_API kbt_status kbt_mailbox_init(const kbt_head *head, void *memory, size_t bytes, kbt_mailbox **mailbox);
/* Called by the learner after an update. Replaces an earlier post that was not taken. */
KBT_API kbt_status kbt_post(const kbt_head *head, kbt_mailbox *mailbox);
/* Called by the reader before it predicts: `head` takes over the newest post, if there is one, and then drops a
 * prediction waiting to be observed. KBT_E_CONFIG, here and in kbt_post: the head's configuration differs from the
 * mailbox's. */
KBT_API kbt_status kbt_take(kbt_head *head, kbt_mailbox *mailbox);

#ifdef __cplusplus
}
#endif

#endif /* KBT_MAILBOX_H */
