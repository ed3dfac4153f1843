// neuron.hpp - a posterior with one covariance block per neuron: method.md (5.1). From eight neurons on they are
// interleaved, eight to a LaneUD (W = 8); fewer have a ColumnUD each (W = 1).
#pragma once

#include "joint.hpp"

namespace kbt {

template <class T, Index W>
struct Neurons {
  KBT_INLINE static void weight_cov(const LayerParts<T> &layer, const Cov<T> &out, const Work<T> &) {
    const Posterior<T> &w = layer.w;
    const Index rows = out.rows;
    if (W == kLanes && rows == 1 && !out.dense) {  // the hidden layer of a control loop
      layer.loops->forward_lanes(w.lanes(0), w.groups(), layer.z, layer.F, layer.weight_var, out.data);
      return;
    }
    project(layer, rows);
    for (Index g = 0; g < w.groups(); ++g) {
      for (Index a = 0; a < rows; ++a) {
        for (Index b = 0; b <= a; ++b) {
          T *const x = layer.weight_var + (a * rows + b) * w.var_stride() + g * W;
          loops(layer).weigh(factor(w, g), layer.projection(g * rows + a), layer.projection(g * rows + b), x);
          for (Index l = 0; a != b && l < W; ++l) layer.weight_var[(b * rows + a) * w.var_stride() + g * W + l] = x[l];
          add(out, a, b, g, x);
        }
      }
    }
  }

  static void input_cov(const LayerParts<T> &layer, const Cov<T> &in, const Cov<T> &out, const Work<T> &work) {
    for (Index g = 0; g < layer.w.groups(); ++g) {
      const UD<T, W> s = factor(layer.w, g);
      for (Index a = 0; a < in.rows; ++a) {
        for (Index b = 0; b <= a; ++b) {
          alignas(16) T x[W];
          if (in.dense) {
            loops(layer).trace_times(s, in.block(a, b), work.vector, x);
          } else {
            loops(layer).diagonal_times(s, constant_view<T>(&in.same(a, b, 0), in.n), work.vector, x);
          }
          add(out, a, b, g, x);
        }
      }
    }
  }

  static int update(LayerParts<T> &layer, const Adjoint<T> &adjoint, const Work<T> &work) {
    if (adjoint.rows == 1) return update_row(layer, adjoint, work);
    int floored = 0;
    for (Index g = 0; g < layer.w.groups(); ++g) {
      floored += JointUpdate<T, W>(layer, factor(layer.w, g), g, adjoint, work).run();
    }
    return floored;
  }

 private:
  static UD<T, W> factor(const Posterior<T> &w, Index g) {
    if constexpr (W == 1) {
      return w.column(g);
    } else {
      return w.lanes(g);
    }
  }
  static const FactorLoops<T, W> &loops(const LayerParts<T> &layer) { return JointUpdate<T, W>::loops_of(layer); }

  static void project(const LayerParts<T> &layer, Index rows) {
    const Posterior<T> &w = layer.w;
    for (Index a = 0; a < rows; ++a) {
      if constexpr (W == kLanes) {
        layer.loops->project_lanes(w.lanes(0), w.groups(), layer.input(a), layer.projection(a), rows * w.length());
      } else {
        for (Index g = 0; g < w.groups(); ++g) {
          layer.loops->project_column(w.column(g), layer.input(a), layer.projection(g * rows + a));
        }
      }
    }
  }

  // Cov(u_aj, u_bj) += x for the neurons of group g. A dense covariance has no padding.
  static void add(const Cov<T> &out, Index a, Index b, Index g, const T *x) {
    const Index first = g * W, end = out.dense && out.n < first + W ? out.n : first + W;
    for (Index j = first; j < end; ++j) out.add_same(a, b, j, x[j - first]);
  }

  // One row: a single step for each neuron, method.md (5.1), with a share that has no cancellation where the noise is
  // known.
  static int update_row(LayerParts<T> &layer, const Adjoint<T> &adjoint, const Work<T> &work) {
    const Posterior<T> &w = layer.w;
    const T *share = adjoint.share;
    if (adjoint.noise != nullptr && adjoint.rank > 1) {
      share = work.inner;
      for (Index g = 0; g < w.groups(); ++g) {
        Eigen::Map<Eigen::Array<T, W, 1>>(work.inner + g * W) =
            JointUpdate<T, W>(layer, factor(w, g), g, adjoint, work).separate_share();
      }
    }
    if constexpr (W == kLanes) {
      const MatrixView<T> B = matrix<T>(adjoint.B(0, 0), adjoint.rank, w.stride, adjoint.stride);
      const RowUpdate<T> row{layer.F,       B,
                             adjoint.signs, layer.weight_var,
                             share,         kSmallestShare<T>,
                             adjoint.r(0),  adjoint.may_grow(),
                             w.mean,        w.stride,
                             work.step};
      return layer.loops->update_lanes(w.lanes(0), w.groups(), row);
    } else {
      int floored = 0;
      for (Index j = 0; j < w.n; ++j) {
        T lambda = T(0), left;
        for (Index k = 0; k < adjoint.rank; ++k) lambda += adjoint.signs[k] * adjoint.B(k, 0)[j] * adjoint.B(k, 0)[j];
        if (share != nullptr) {
          left = share[j];
        } else if (adjoint.noise != nullptr) {
          left = adjoint.signs[0] * *adjoint.noise;
        } else {
          left = T(1) - lambda * layer.weight_var[j];
        }
        const bool low = !(left >= kSmallestShare<T>);
        if (low) left = kSmallestShare<T>;
        floored += low;
        loops(layer).rank_one(w.column(j), layer.projection(j), &lambda, &left, adjoint.may_grow(), work.step);
        const T r = adjoint.r(0)[j];
        if (w.stride == 1) {
          layer.loops->axpy(w.mean, r, work.step, w.M1);
        } else {
          for (Index p = 0; p < w.M1; ++p) w.mean[p * w.stride + j] += work.step[p] * r;
        }
      }
      return floored;
    }
  }
};

}  // namespace kbt
