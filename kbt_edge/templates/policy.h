/* @name@.h - a frozen network and a head that learns, in physical units. C99, no heap.
 * @made@
 *
 * The head:
@config@
 *
 * One policy is one set of static memory: call from one thread at a time. Whatever a call refuses, it says so with a
 * status (kbt/kbt.h) and has learned nothing.
 */
#ifndef @upper@_H
#define @upper@_H

#include "kbt/kbt_store.h"

#ifdef __cplusplus
extern "C" {
#endif

#define @upper@_ROWS @rows@
#define @upper@_OUTPUTS @outputs@
#define @upper@_STATE_BYTES @state_bytes@
#define @upper@_SLOT_BYTES @slot_bytes@ /* of a slot for save and load, before rounding up to erase sectors */

/* Before anything else: the head as it was when this file was made. KBT_OK, or the memory is not as planned. */
kbt_status @name@_init(void);

/* @input_comment@.
 * mean: @rows@ x @outputs@. cov: epistemic covariance, or NULL. total_var: the variance of a new observation, or NULL.
 * @refused_input@: an input was refused; KBT_E_RANGE: the network's output is not finite. */
kbt_status @name@_predict(@inputs@, double mean[@count@], double cov[@count_squared@], double total_var[@count@]);

/* Learn the target of the latest prediction, once. y: @rows@ x @outputs@ @target_comment@. result may be NULL. */
kbt_status @name@_observe(const double y[@count@], kbt_result *result);
@labels_declared@
/* The learned state to flash and back, whatever happens to the power: kbt/kbt_store.h. */
kbt_store_status @name@_save(const kbt_store *store);
kbt_store_status @name@_load(const kbt_store *store);

/* The head itself, for the rest of kbt/kbt.h; its units are those of the network. NULL before init. */
kbt_head *@name@_head(void);

#ifdef __cplusplus
}
#endif

#endif /* @upper@_H */
