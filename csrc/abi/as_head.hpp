// as_head.hpp - a head of the C ABI as the class of its number type.
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

}  // namespace kbt
