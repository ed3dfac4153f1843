// shared.hpp - a posterior with one covariance for all neurons of a layer: method.md §10.
#pragma once

#include "neuron.hpp"

namespace kbt {

template <class T>
struct Shared {
  // One row: a single step of the factor, whose gain every neuron takes r times.
  static int update(LayerParts<T> &layer, const Adjoint<T> &adjoint, const Work<T> &work) {
    const Posterior<T> &w = layer.w;
    const T lambda = *adjoint.B(0, 0) * *adjoint.B(0, 0);
    T left = adjoint.share != nullptr ? *adjoint.share : T(1) - lambda * *layer.weight_var;
    const bool low = !(left >= kSmallestShare<T>);
    if (low) left = kSmallestShare<T>;
    layer.loops->column.rank_one(w.column(0), layer.F, &lambda, &left, false, work.step);
    for (Index p = 0; p < w.M1; ++p) layer.loops->axpy(w.mean + p * w.stride, work.step[p], adjoint.r(0), w.stride);
    return low;
  }
};

}  // namespace kbt
