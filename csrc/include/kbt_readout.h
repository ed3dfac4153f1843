/* kbt_readout.h - a softmax over many classes, such as the tokens of a language model, that keeps learning. C99.
 *
 * The readout (weight and bias) stays where it is and is only read. What was learned is kept for the rows that were
 * touched, in a table of fixed size. All classes share one covariance. A step updates the label, the `top` most
 * probable classes and all rows in the table; the result says how much the classes that it left out could matter.
 * Probabilities are those of all classes. docs/method.md section 10 has the mathematics.
 *
 * float32, one row at a time. As with kbt.h: no allocation after kbt_readout_init, and a call that is rejected changes
 * nothing. */
#ifndef KBT_READOUT_H
#define KBT_READOUT_H

#include "kbt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kbt_readout kbt_readout;

typedef struct kbt_readout_config {
  int32_t d, classes; /* classes: 2 to 2^20 */
  int32_t top;        /* classes that a step updates beside the label: 1 to classes */
  int32_t held;       /* rows in the table: top + 1 to classes */
  double prior_var;   /* variance of every weight before any data */
} kbt_readout_config;

typedef struct kbt_readout_result {
  double log_likelihood; /* of the label, before it was learned */
  double left_out;       /* the probabilities at this input would differ by at most this (total variation) had all
                            classes learned the label */
  int64_t dropped;       /* rows that left the table for others, and are as in the readout again */
} kbt_readout_result;

/* What is wrong with the configuration, or NULL. */
KBT_API const char *kbt_readout_check(const kbt_readout_config *cfg);
/* Memory that kbt_readout_init needs; 0 if the configuration is rejected. */
KBT_API size_t kbt_readout_bytes(const kbt_readout_config *cfg);
/* weight: classes x d, row-major. bias: classes, or NULL. Both must stay where they are and as they are. */
KBT_API kbt_status kbt_readout_init(const kbt_readout_config *cfg, const float *weight, const float *bias, void *memory,
                                    size_t bytes, kbt_readout **readout);

/* h: d. p: classes, or NULL. var: the variance of a logit at h, the same for all classes, or NULL. */
KBT_API kbt_status kbt_readout_predict(kbt_readout *readout, const float *h, float *p, float *var);
/* Learn the label of the latest prediction, once. */
KBT_API kbt_status kbt_readout_observe(kbt_readout *readout, int32_t label, kbt_readout_result *result);
KBT_API kbt_status kbt_readout_update(kbt_readout *readout, const float *h, int32_t label, kbt_readout_result *result);

KBT_API uint64_t kbt_readout_samples(const kbt_readout *readout); /* labels learned */
KBT_API uint64_t kbt_readout_dropped(const kbt_readout *readout); /* rows that left the table */
KBT_API int32_t kbt_readout_held(const kbt_readout *readout);     /* rows in the table now */
KBT_API kbt_status kbt_readout_reset(kbt_readout *readout);       /* the readout again */

/* What was learned, as bytes that are the same on every machine. They fit the readout they were learned on, whose
 * CRC-32 is in them. Loading checks all of it before anything changes. */
KBT_API size_t kbt_readout_state_size(const kbt_readout *readout);
KBT_API kbt_status kbt_readout_state_write(const kbt_readout *readout, kbt_sink *sink, void *context);
KBT_API kbt_status kbt_readout_state_load(kbt_readout *readout, const void *blob, size_t size);

#ifdef __cplusplus
}
#endif

#endif
