// engine_avx2.cpp - predict and learn once more, compiled with -mavx2. x86-64 only; kbt.cpp decides at run time.
//
// The renamed namespaces keep every inline function of this file apart from its baseline twin: the linker would merge
// equal names and might hand AVX2 code to a machine without it. The bits are the same (tests/test_same_bits.py).
//
// float32 only, the first-class type: float64 would take as much room again.
#define kbt kbt_avx2
#define Eigen Eigen_avx2
#ifndef KBT_NO_FLOAT64
#define KBT_NO_FLOAT64
#endif
#include "engine.hpp"

kbt_status kbt_predict_avx2(kbt_head *head, const void *h, std::int32_t rows, void *mean, void *cov, void *total_var) {
  return kbt::predict(head, h, rows, mean, cov, total_var);
}
kbt_status kbt_learn_avx2(kbt_head *head, const kbt_sample &sample, kbt_result *result) {
  return kbt::learn(head, sample, result);
}
