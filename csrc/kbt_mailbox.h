/* kbt_mailbox.h - what one head learns, in the hands of another that only predicts. C99, no heap, no lock.
 *
 * One thread learns and posts after an update; another one takes what is newest and predicts with a head of its own. A
 * mailbox stands between these two, one for each reader. It holds four copies of what a head has learned: one that the
 * learner writes, one that the reader reads, one that it reads next, and one that changes hands by a single atomic
 * exchange. So
 *  - neither side ever waits for the other, or repeats anything;
 *  - the reader sees the posterior after a whole update, never half of one;
 *  - posting costs a copy of the learned numbers, and taking none.
 *
 * The reader's head works on the copy that it has taken, where it lies: only one head may take from a mailbox, which
 * must live as long as that head.
 *
 * It works as well between a main loop and an interrupt of a microcontroller with atomic exchange (Cortex-M3 and up).
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
/* Instead of kbt_take, for a reader that predicts without rest and wants every prediction to be as quick as the others.
 * After kbt_take, a prediction waits until all that was posted has come from the caches of the learner's core. This
 * call asks for a sixteenth of it, to arrive while `head` predicts with what it has; the seventeenth call takes it. So
 * a post, or a newer one, is taken within 33 calls: microseconds for a reader that never rests, too late for one that
 * does. */
KBT_API kbt_status kbt_follow(kbt_head *head, kbt_mailbox *mailbox);

#ifdef __cplusplus
}
#endif

#endif /* KBT_MAILBOX_H */
