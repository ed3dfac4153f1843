#include <string.h>

#include "kbt_policy.h"

/* Whether the head computes in double, which firmware for a float32 head leaves out. */
static int is_double(const kbt_policy *p) {
#ifdef KBT_NO_FLOAT64
  (void)p;
  return 0;
#else
  return p->is_double;
#endif
}

/* Number i of an array in the head's dtype. Read with memcpy, as it may lie in memory that is declared as doubles. */
static double head_value(const kbt_policy *p, const void *from, size_t i) {
  if (is_double(p)) {
    double value;
    memcpy(&value, (const char *)from + i * sizeof value, sizeof value);
    return value;
  }
  float value;
  memcpy(&value, (const char *)from + i * sizeof value, sizeof value);
  return (double)value;
}

static void set_head_value(const kbt_policy *p, void *to, size_t i, double value) {
  const float narrow = (float)value;
  if (is_double(p)) {
    memcpy((char *)to + i * sizeof value, &value, sizeof value);
  } else {
    memcpy((char *)to + i * sizeof narrow, &narrow, sizeof narrow);
  }
}

/* Variances (count = n) or a matrix (count = n * n) that the head wrote to the start of `numbers`, to doubles in
 * physical units. From the last to the first, so that none is overwritten before it is read. */
static void scale_squares(const kbt_policy *p, double *numbers, size_t count, size_t n) {
  const size_t outputs = (size_t)p->outputs;
  for (size_t i = count; i-- > 0;) {
    const size_t row = count == n ? i : i / n, column = i % n;
    numbers[i] = p->scale[row % outputs] * p->scale[column % outputs] * head_value(p, numbers, i);
  }
}

static size_t count_of(const kbt_policy *p) {
  return (size_t)p->rows * (size_t)p->outputs;
}

static const void *rows_of(const kbt_policy *p) {
  if (!is_double(p)) return p->h;
  for (size_t i = 0; i < (size_t)p->rows * (size_t)p->d; ++i) p->wide_h[i] = (double)p->h[i];
  return p->wide_h;
}

kbt_status kbt_policy_init(kbt_policy *p) {
  kbt_config cfg;
  if (p == NULL || p->offset == NULL || p->scale == NULL || p->h == NULL || p->u == NULL) return KBT_E_NULL;
  if (p->input_count > 0 && (p->inputs == NULL || p->network_inputs == NULL)) return KBT_E_NULL;
  const kbt_status status = kbt_get_config(p->head, &cfg);
  if (status != KBT_OK) return status;
  if (p->rows < 1 || p->rows > cfg.max_rows) return KBT_E_ROWS;
  p->d = cfg.widths[0];
  p->outputs = cfg.widths[cfg.layers];
  p->is_double = cfg.dtype == KBT_FLOAT64;
  p->takes_matrix = cfg.noise == KBT_NOISE_MATRIX;
  return p->is_double && p->wide_h == NULL ? KBT_E_NULL : KBT_OK;
}

void kbt_policy_scale_input(const kbt_policy_input *input, const double *x) {
  int32_t f = 0;
  for (int32_t i = 0; i < input->count; ++i) {
    input->scaled[i] = (float)((x[i] - input->mean[f]) / input->scale[f]);
    f = f + 1 < input->features ? f + 1 : 0;
  }
}

kbt_status kbt_policy_features(kbt_policy *p, const void *const *x) {
  if (p->trunk == NULL) return KBT_E_NULL;
  for (int32_t i = 0; i < p->input_count; ++i) {
    if (x[i] == NULL) return KBT_E_NULL;
    p->network_inputs[i] = x[i];
    if (p->inputs[i].features > 0) {
      kbt_policy_scale_input(&p->inputs[i], (const double *)x[i]);
      p->network_inputs[i] = p->inputs[i].scaled;
    }
  }
  const int failed = p->trunk(p->context, p->network_inputs, p->h);
  if (failed == 0) return KBT_OK;
  return failed == 1 ? KBT_E_TRUNK_INPUT : KBT_E_TRUNK_OUTPUT;
}

kbt_status kbt_policy_predict(kbt_policy *p, const void *const *x, double *mean, double *cov, double *total_var) {
  const kbt_status status = mean == NULL ? KBT_E_NULL : kbt_policy_features(p, x);
  return status == KBT_OK ? kbt_policy_predict_rows(p, mean, cov, total_var) : status;
}

kbt_status kbt_policy_predict_rows(kbt_policy *p, double *mean, double *cov, double *total_var) {
  const size_t n = count_of(p);
  const kbt_status status = kbt_predict(p->head, rows_of(p), p->rows, p->u, cov, total_var);
  if (status != KBT_OK) return status;
  if (p->latest != NULL) *p->latest = p;
  for (size_t i = 0; i < n; ++i) {
    const size_t k = i % (size_t)p->outputs;
    mean[i] = p->offset[k] + p->scale[k] * head_value(p, p->u, i);
  }
  if (total_var != NULL) scale_squares(p, total_var, n, n);
  if (cov != NULL) scale_squares(p, cov, n * n, n);
  return KBT_OK;
}

kbt_status kbt_policy_predicted(kbt_policy *p, double *var, double *cov) {
  const size_t n = count_of(p);
  if (p->latest != NULL && *p->latest != p) return KBT_E_OWNER;
  const kbt_status status = kbt_predicted(p->head, var, cov);
  if (status != KBT_OK) return status;
  if (var != NULL) scale_squares(p, var, n, n);
  if (cov != NULL) scale_squares(p, cov, n * n, n);
  return KBT_OK;
}

void kbt_policy_target(const kbt_policy *p, const double *y, void *u) {
  for (size_t i = 0; i < count_of(p); ++i) {
    const size_t k = i % (size_t)p->outputs;
    set_head_value(p, u, i, (y[i] - p->offset[k]) / p->scale[k]);
  }
}

kbt_status kbt_policy_scale_noise(const double *noise, int32_t count, const double *scale, int32_t outputs, double *to,
                                  int32_t *to_count) {
  const int matrix = outputs > 1 && count == (int64_t)outputs * outputs;
  if (count != 1 && count != outputs && !matrix) return KBT_E_NOISE;
  for (int32_t i = 0; i < (matrix ? count : outputs); ++i) {
    const double by = matrix ? scale[i / outputs] * scale[i % outputs] : scale[i] * scale[i];
    to[i] = noise[count == 1 ? 0 : i] / by;
  }
  *to_count = matrix ? count : outputs;
  return KBT_OK;
}

/* Noise for the head, in the memory of p->noise: *noise and *count become what the head takes. */
static kbt_status noise_for_head(const kbt_policy *p, const double **noise, int32_t *count) {
  if (*noise == NULL) return *count == 0 ? KBT_OK : KBT_E_NULL;
  if (p->noise == NULL) return KBT_E_NULL;
  if (*count > p->outputs && !p->takes_matrix) return KBT_E_NOISE;
  const kbt_status status = kbt_policy_scale_noise(*noise, *count, p->scale, p->outputs, p->noise, count);
  if (status != KBT_OK) return status;
  for (int32_t i = 0; i < *count; ++i) set_head_value(p, p->noise, (size_t)i, p->noise[i]);
  *noise = p->noise;
  return KBT_OK;
}

/* A prediction by the head itself or by another policy has other units, and perhaps other rows. */
static kbt_status may_observe(const kbt_policy *p) {
  const int32_t waiting = kbt_predicted_rows(p->head);
  const int foreign = waiting != p->rows || (p->latest != NULL && *p->latest != p);
  return waiting > 0 && foreign ? KBT_E_OWNER : KBT_OK;
}

static kbt_status corrected(const kbt_policy *p, kbt_status status, kbt_result *result) {
  if ((status == KBT_OK || status == KBT_GATED) && result != NULL) result->log_likelihood -= p->log_scale;
  return status;
}

kbt_status kbt_policy_observe(kbt_policy *p, const double *y, const double *noise, int32_t noise_count,
                              kbt_result *result) {
  kbt_status status = y == NULL ? KBT_E_NULL : may_observe(p);
  if (status == KBT_OK) status = noise_for_head(p, &noise, &noise_count);
  if (status != KBT_OK) return status;
  kbt_policy_target(p, y, p->u);
  return corrected(p, kbt_observe(p->head, p->u, noise, noise_count, result), result);
}

kbt_status kbt_policy_observe_labels(kbt_policy *p, const int32_t *labels, const double *noise, int32_t noise_count,
                                     kbt_result *result) {
  kbt_status status = may_observe(p);
  if (status == KBT_OK) status = noise_for_head(p, &noise, &noise_count);
  if (status != KBT_OK) return status;
  return corrected(p, kbt_observe_labels(p->head, labels, noise, noise_count, result), result);
}

kbt_status kbt_policy_update_rows(kbt_policy *p, const double *y, const double *noise, int32_t noise_count,
                                  kbt_result *result) {
  const kbt_status status = y == NULL ? KBT_E_NULL : noise_for_head(p, &noise, &noise_count);
  if (status != KBT_OK) return status;
  kbt_policy_target(p, y, p->u);
  return corrected(p, kbt_update(p->head, rows_of(p), p->rows, p->u, noise, noise_count, result), result);
}

kbt_status kbt_policy_update_rows_labels(kbt_policy *p, const int32_t *labels, const double *noise, int32_t noise_count,
                                         kbt_result *result) {
  const kbt_status status = noise_for_head(p, &noise, &noise_count);
  if (status != KBT_OK) return status;
  return corrected(p, kbt_update_labels(p->head, rows_of(p), p->rows, labels, noise, noise_count, result), result);
}

kbt_status kbt_policy_get_noise(const kbt_policy *p, double *noise, int32_t *count) {
  const kbt_status status = kbt_get_noise(p->head, noise, count);
  if (status != KBT_OK) return status;
  scale_squares(p, noise, (size_t)*count, (size_t)p->outputs);
  return KBT_OK;
}
