// engine.hpp - the two calls of a control loop, predict and learn, for whatever dtype the head has.
//
// Everything hot is behind these two functions, so that an instruction set is chosen once per call: kbt.cpp includes
// this file for the baseline, engine_avx2.cpp once more, in a namespace of its own, for AVX2.
#pragma once

#include "head.hpp"

namespace kbt {

// Calls f with the head as what it is.
template <class F>
auto as_head(kbt_head *head, F f) {
#ifndef KBT_NO_FLOAT64
  if (head->cfg.dtype == KBT_FLOAT64) return f(*static_cast<Head<double> *>(head));
#endif
  return f(*static_cast<Head<float> *>(head));
}
template <class F>
auto as_head(const kbt_head *head, F f) {
#ifndef KBT_NO_FLOAT64
  if (head->cfg.dtype == KBT_FLOAT64) return f(*static_cast<const Head<double> *>(head));
#endif
  return f(*static_cast<const Head<float> *>(head));
}
template <class H>
struct Element;
template <class T>
struct Element<Head<T>> {
  using Type = T;
};
template <class H>
using ElementOf = typename Element<std::remove_const_t<std::remove_reference_t<H>>>::Type;

// Every row non-negative with sum 1.
template <class T>
bool probabilities(const T *y, Index rows, Index n) {
  for (Index a = 0; a < rows; ++a) {
    T sum = T(0);
    for (Index i = 0; i < n; ++i) {
      if (y[a * n + i] < T(0)) return false;
      sum += y[a * n + i];
    }
    if (!(std::fabs(sum - T(1)) <= T(1e-4))) return false;
  }
  return true;
}

inline kbt_status refuse(kbt_head *head, kbt_status status) {
  ++head->counters.rejected;
  return status;
}

// Predict at h, or keep the latest prediction; then learn the target.
inline kbt_status learn(kbt_head *head, const kbt_sample &sample, kbt_result *result) {
  if (head == nullptr) return KBT_E_NULL;
  if ((!sample.predicted && sample.h == nullptr) || (sample.y == nullptr && sample.labels == nullptr)) {
    return refuse(head, KBT_E_NULL);
  }
  if (sample.noise == nullptr && sample.noise_count != 0) return refuse(head, KBT_E_NOISE);
  if (!sample.predicted && (sample.rows < 1 || sample.rows > head->cfg.max_rows)) return refuse(head, KBT_E_ROWS);
  if (sample.predicted && head->predicted_rows == 0) return refuse(head, KBT_E_ORDER);
  const Index rows = sample.predicted ? head->predicted_rows : sample.rows;
  return as_head(head, [&](auto &self) {
    using T = ElementOf<decltype(self)>;
    const Index d = self.inputs(), n = self.outputs();
    const T *h = static_cast<const T *>(sample.h), *y = static_cast<const T *>(sample.y);
    const T *noise = static_cast<const T *>(sample.noise);
    if (!sample.predicted && !all_finite(h, rows * d)) return refuse(head, KBT_E_NONFINITE);
    if (sample.labels != nullptr) {
      if (self.cfg.output != KBT_SOFTMAX) return refuse(head, KBT_E_LABEL);
      for (Index a = 0; a < rows; ++a) {
        if (sample.labels[a] < 0 || sample.labels[a] >= n) return refuse(head, KBT_E_LABEL);
      }
      for (Index i = 0; i < rows * n; ++i) self.target()[i] = T(sample.labels[i / n] == i % n);
      y = self.target();
    } else {
      if (!all_finite(y, rows * n)) return refuse(head, KBT_E_NONFINITE);
      if (self.cfg.output == KBT_SOFTMAX && !probabilities(y, rows, n)) return refuse(head, KBT_E_LABEL);
    }
    if (noise != nullptr &&
        !(self.noise_count_allowed(sample.noise_count) && self.noise_valid(noise, sample.noise_count))) {
      return refuse(head, KBT_E_NOISE);
    }
    kbt_status status = sample.predicted ? KBT_OK : self.forward(h, rows);
    if (status == KBT_OK) status = self.observe(y, noise, sample.noise_count, result);
    if (status == KBT_OK || status == KBT_GATED) return status;
    if (!sample.predicted) self.take_back();
    return refuse(head, status);
  });
}

inline kbt_status predict(kbt_head *head, const void *h, std::int32_t rows, void *mean, void *cov, void *total_var) {
  if (head == nullptr) return KBT_E_NULL;
  if (h == nullptr || mean == nullptr) return refuse(head, KBT_E_NULL);
  if (rows < 1 || rows > head->cfg.max_rows) return refuse(head, KBT_E_ROWS);
  return as_head(head, [&](auto &self) {
    using T = ElementOf<decltype(self)>;
    const T *input = static_cast<const T *>(h);
    if (!all_finite(input, rows * self.inputs())) return refuse(head, KBT_E_NONFINITE);
    const kbt_status status = self.forward(input, rows);
    if (status == KBT_OK) {
      self.read_prediction(static_cast<T *>(mean), static_cast<T *>(cov), static_cast<T *>(total_var));
      return status;
    }
    self.take_back();
    return refuse(head, status);
  });
}

}  // namespace kbt
