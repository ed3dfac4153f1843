// full.hpp - a posterior with all correlations of a layer's weights: one ColumnUD over all neurons, weights of a neuron
// one after another.
#pragma once

#include "neuron.hpp"

namespace kbt {

template <class T>
struct Full {
  static void weight_cov(const LayerParts<T> &layer, const Cov<T> &out, const Work<T> &work) {
    const Posterior<T> &w = layer.w;
    if (w.n == 1) return Neurons<T, 1>::weight_cov(layer, out, work);
    const ColumnUD<T> s = w.column(0);
    for (Index a = 0; a < out.rows; ++a) {
      layer.loops->project_group(s, w.n, layer.input(a), layer.projection(a * w.n));
    }
    const Index count = out.rows * w.n;
    layer.loops->weigh_group(s, w.n, layer.F, count, layer.projection(count), out.data);
  }

  static void input_cov(const LayerParts<T> &layer, const Cov<T> &in, const Cov<T> &out, const Work<T> &work) {
    const Posterior<T> &w = layer.w;
    layer.loops->input_group(w.column(0), w.n, in.data, in.rows, work.vector, work.inner, out.data);
  }

  static int update(LayerParts<T> &layer, const Adjoint<T> &adjoint, const Work<T> &work) {
    if (layer.w.n == 1) return Neurons<T, 1>::update(layer, adjoint, work);
    return JointUpdate<T, 1>(layer, layer.w.column(0), 0, adjoint, work).run();
  }
};

}  // namespace kbt
