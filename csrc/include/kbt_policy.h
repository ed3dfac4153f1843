/* kbt_policy.h - a frozen network, the head behind it, and the physical units around both. C99, no heap.
 *
 * The network gets (x - mean) / scale. The head's output u means y = offset + scale * u, so means come out as
 * offset + scale * E u, covariances as scale_i * scale_k * Cov(u_i, u_k), noise goes in as R / (scale_i * scale_k), and
 * a log density loses the sum of log scale. All of it is computed in double: an offset may need more digits than
 * a float has, and the square of a scale may not fit into one.
 *
 * The caller owns the struct and everything it points to, fills it, and calls kbt_policy_init once. Probabilities
 * (softmax) have no units: offset 0 and scale 1. A rejected call (KBT_E_...) learns nothing and leaves its
 * results unchanged, except for cov and total_var.
 */
#ifndef KBT_POLICY_H
#define KBT_POLICY_H

#include "kbt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Run the network: one array per input, floats or int64_t ids, to h (rows x d). Returns 0; 1: an input was rejected;
 * anything else: the output is not finite. */
typedef int kbt_trunk(void *context, const void *const *inputs, float *h);

typedef struct kbt_policy_input {
  int32_t count;              /* numbers in this input */
  int32_t features;           /* length of its last axis; 0: int64_t ids, passed on unchanged */
  const double *mean, *scale; /* one of each per feature */
  float *scaled;              /* room for `count` */
} kbt_policy_input;

typedef struct kbt_policy {
  kbt_head *head;
  int32_t rows; /* of the network's output, 1..max_rows of the head */
  int32_t input_count;
  const kbt_policy_input *inputs;
  const void **network_inputs;  /* room for input_count pointers */
  kbt_trunk *trunk;             /* NULL: the caller scales with kbt_policy_scale_input and writes h itself */
  void *context;                /* for `trunk` */
  const double *offset, *scale; /* d_o each */
  double log_scale;             /* rows * sum of log scale */
  float *h;                     /* rows x d, the network's output */
  double *wide_h;               /* rows x d for a float64 head, else NULL */
  void *u;                      /* room for rows x d_o in the head's dtype */
  double *noise;                /* room for d_o, with KBT_NOISE_MATRIX d_o x d_o; NULL: noise is never given */
  /* Shared by all policies of one head: the policy that made the latest prediction. NULL: the only user of the head. */
  const struct kbt_policy **latest;
  int32_t d, outputs, is_double, takes_matrix; /* set by kbt_policy_init */
} kbt_policy;

/* Check what was filled in, and read the sizes from the head. KBT_E_NULL, or KBT_E_ROWS. */
KBT_API kbt_status kbt_policy_init(kbt_policy *policy);

/* x: one array per input in physical units, double or int64_t ids. Scales them, runs the network and leaves its output
 * in h. KBT_E_TRUNK_INPUT or KBT_E_TRUNK_OUTPUT if the network fails. */
KBT_API kbt_status kbt_policy_features(kbt_policy *policy, const void *const *x);
/* One input only, to its `scaled`, for a caller that runs the network itself. */
KBT_API void kbt_policy_scale_input(const kbt_policy_input *input, const double *x);

/* mean: rows x d_o. cov: (rows * d_o)^2 epistemic, or NULL. total_var: rows x d_o, or NULL. */
KBT_API kbt_status kbt_policy_predict(kbt_policy *policy, const void *const *x, double *mean, double *cov,
                                      double *total_var);
/* The same at the rows in h. */
KBT_API kbt_status kbt_policy_predict_rows(kbt_policy *policy, double *mean, double *cov, double *total_var);
/* More of the latest prediction, as kbt_predicted gives it. KBT_E_OWNER if another policy made it. */
KBT_API kbt_status kbt_policy_predicted(kbt_policy *policy, double *var, double *cov);

/* Learn the target y (rows x d_o) of the latest prediction, once. noise overrides R for this call: 1, d_o or d_o * d_o
 * numbers in squared units of y, or NULL, 0. `result` may be NULL. KBT_E_OWNER: the latest prediction of the head was
 * not made by this policy. */
KBT_API kbt_status kbt_policy_observe(kbt_policy *policy, const double *y, const double *noise, int32_t noise_count,
                                      kbt_result *result);
KBT_API kbt_status kbt_policy_observe_labels(kbt_policy *policy, const int32_t *labels, const double *noise,
                                             int32_t noise_count, kbt_result *result);
/* The same at the rows in h, without a prediction before. */
KBT_API kbt_status kbt_policy_update_rows(kbt_policy *policy, const double *y, const double *noise, int32_t noise_count,
                                          kbt_result *result);
KBT_API kbt_status kbt_policy_update_rows_labels(kbt_policy *policy, const int32_t *labels, const double *noise,
                                                 int32_t noise_count, kbt_result *result);

/* y in the units of the head: u (rows x d_o) in the head's dtype. Numbers that do not fit become infinite. */
KBT_API void kbt_policy_target(const kbt_policy *policy, const double *y, void *u);
/* Noise in squared units of y as noise of u, for `outputs` scales. *to_count is outputs or outputs * outputs, and `to`
 * has room for them. KBT_E_NOISE: `count` is none of 1, outputs and outputs * outputs. */
KBT_API kbt_status kbt_policy_scale_noise(const double *noise, int32_t count, const double *scale, int32_t outputs,
                                          double *to, int32_t *to_count);
/* The head's noise in squared units of y; *count is d_o or d_o * d_o, with room as for kbt_get_noise. */
KBT_API kbt_status kbt_policy_get_noise(const kbt_policy *policy, double *noise, int32_t *count);

#ifdef __cplusplus
}
#endif

#endif /* KBT_POLICY_H */
