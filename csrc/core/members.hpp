// members.hpp - the watchful head: eight linear regressions side by side that differ in how they think the plant moves,
// weighed by what each of them predicted. method.md §9.
//
// Everything of a member is in units of its noise, (8.1): the weights of output o have covariance R_o P, so P does not
// depend on R and is the same for all outputs. The eight P are the lanes of one LaneUD, so one pass updates all of
// them. The bias is the first input: column 0 of U is then e_0, and a random walk of the bias is an addition to D_0.
#pragma once

#include "arena.hpp"
#include "loops.hpp"
#include "member_store.hpp"
#include "noise.hpp"

namespace kbt {

template <class T>
class Members {
 public:
  using Store = MemberStore<T>;
  static constexpr Index L = kLanes;

  // Scratch of one prediction. The learned numbers are in the store.
  KBT_SELDOM void plan(Arena &arena, const Store &store, Index rows) {
    const Index M = store.M, O = store.O;
    outputs_ = O;
    z_stride_ = padded(M);
    z_ = arena.take<T>(rows * z_stride_);
    other_z_ = arena.take<T>(rows * z_stride_);
    F_ = arena.take<T>(rows * M * L);
    c_ = arena.take<T>(rows * L);
    means_ = arena.take<T>(rows * O * L);
    error_ = arena.take<T>(O * L);
    first_d_ = arena.take<T>(M * L);
    step_ = arena.take<T>(LaneUD<T>::step_count(M));
    mean_ = arena.take<T>(rows * O);
    total_ = arena.take<T>(rows * O);
    square_ = arena.take<T>(store.matrix ? O * O + O : 0);
  }
  void choose() { loops_.choose(); }
  const T *input(Index row) const { return z_ + row * z_stride_ + 1; }  // h of the latest forward pass
  const T *mean() const { return mean_; }

  // ---- predict -----------------------------------------------------------------------------------------------------

  // Every member at every row. Without h: at the input of the pass before the latest.
  kbt_status forward(const Store &s, const T *h, Index rows, T flush_below) {
    std::swap(z_, other_z_);
    if (h != nullptr) set_input(s, h, rows, flush_below);
    if (!s.begun()) set_first_factors(s);
    project(s, 0, rows);
    for (Index a = 0; a < rows; ++a) predict_row(s, a);
    rows_ = rows;
    return mix(s);
  }
  // The mixture again, after the noise was set.
  kbt_status mix(const Store &s) {
    s.weights(weights_);
    for (Index a = 0; a < rows_; ++a) {
      mix_row(s, a);
      if (!in_range(s, a)) return KBT_E_RANGE;
    }
    return KBT_OK;
  }

  // Mean and total variance of the mixture, (9.2); total_var may be null.
  void read_prediction(T *mean, T *total_var) const {
    const Index count = rows_ * outputs_;
    for (Index i = 0; i < count; ++i) mean[i] = mean_[i];
    for (Index i = 0; total_var != nullptr && i < count; ++i) total_var[i] = total_[i];
  }
  // Its epistemic variances.
  void read_var(const Store &s, T *var) const {
    for (Index i = 0; i < rows_ * s.O; ++i) {
      const Index o = i % s.O, a = i / s.O;
      var[i] = T(0);
      for (Index l = 0; l < L; ++l) {
        const T apart = means_[i * L + l] - mean_[i];
        var[i] += weights_[l] * (s.noise(o, o, l) * c_[a * L + l] + apart * apart);
      }
    }
  }
  // Its epistemic covariance.
  void read_cov(const Store &s, T *cov) const {
    const Index O = s.O, count = rows_ * O;
    for (Index i = 0; i < count; ++i) {
      for (Index k = 0; k <= i; ++k) {
        const Index a = i / O, b = k / O;
        alignas(32) T shared[L];
        loops_->lanes.weigh(factor(s), F_ + a * s.M * L, F_ + b * s.M * L, shared);
        T sum = T(0);
        for (Index l = 0; l < L; ++l) {
          const T apart = (means_[i * L + l] - mean_[i]) * (means_[k * L + l] - mean_[k]);
          sum += weights_[l] * (s.noise(i % O, k % O, l) * shared[l] + apart);
        }
        cov[i * count + k] = cov[k * count + i] = sum;
      }
    }
  }

  struct Judged {  // y under the mixture, before it is learned
    T nis, log_density;
  };

  // ---- learn -------------------------------------------------------------------------------------------------------

  // No target may be so large that the square of its error leaves the range.
  static bool target_in_range(const T *y, Index count) { return largest_magnitude(y, count, T(0)) < farthest(); }

  // NIS of the mixture over all rows, for the gate.
  T nis(const Store &s, const T *y) const {
    T sum = T(0);
    for (Index i = 0; i < rows_ * s.O; ++i) {
      const T e = y[i] - mean_[i];
      sum += bounded(e / total_[i] * e);
    }
    return sum;
  }

  // Log density of y at rows that are not learned, as if the rows were independent.
  T log_density(const Store &s, const T *y) {
    T sum = T(0);
    for (Index a = 0; a < rows_; ++a) {
      alignas(32) T each[L], nis;
      for (Index i = 0; i < s.O * L; ++i) error_[i] = y[a * s.O + i / L] - means_[a * s.O * L + i];
      for (Index l = 0; l < L; ++l) judge(s, l, c_[a * L + l], nullptr, nis, each[l]);
      sum += mixed_density(weights_, each, L);
    }
    return sum;
  }

  // Learns the rows of the latest forward pass one after another, which is exact. `given` is the noise of this call, or
  // null: O variances. Returns what the members thought of them, and in `event` whether the plant has changed.
  Judged learn(Store &s, const T *y, const T *given, MemberEvent &event) {
    Judged judged{T(0), T(0)};
    if (!s.begun()) {
      for (Index i = 0; i < s.M * L; ++i) s.d[i] = first_d_[i];
      s.keep_best();
    }
    event = {KBT_NO_CHANGE, 0, 0.0};
    for (Index a = 0; a < rows_; ++a) {
      if (a > 0) {  // the rows before it have changed the members; the step before it has left U^T z of this one
        s.weights(weights_);
        if (s.just_began()) project(s, a, 1);
        predict_row(s, a);
        mix_row(s, a);
      }
      const Judged row = learn_row(s, a, y + a * s.O, given, event);
      judged.nis += row.nis;
      judged.log_density += row.log_density;
    }
    return judged;
  }

 private:
  static T farthest() { return std::sqrt(kLargest<T>); }
  static T bounded(T nis) { return nis < T(1e30) ? nis : T(1e30); }  // not NaN: errors are finite, variances positive

  LaneUD<T> factor(const Store &s) const { return {s.M, s.begun() ? s.d : first_d_, s.u}; }

  void set_input(const Store &s, const T *h, Index rows, T flush_below) {
    for (Index a = 0; a < rows; ++a) {
      T *const z = z_ + a * z_stride_;
      z[0] = T(1);
      for (Index p = 1; p < s.M; ++p) {
        const T x = h[a * (s.M - 1) + p - 1];
        z[p] = std::fabs(x) < flush_below ? T(0) : x;
      }
    }
  }
  // Before the first sample the prior is as wide as the first input asks for. U is the identity.
  void set_first_factors(const Store &s) {
    const T size = dot(z_, z_, s.M);
    for (Index l = 0; l < L; ++l) {
      const T d = s.prior_of(l, size);
      for (Index p = 0; p < s.M; ++p) first_d_[p * L + l] = d;
    }
  }
  void project(const Store &s, Index a, Index rows) {
    loops_->project_rows(factor(s), rows, z_ + a * z_stride_, z_stride_, F_ + a * s.M * L);
  }
  void predict_row(const Store &s, Index a) {
    const T *const z = z_ + a * z_stride_, *const f = F_ + a * s.M * L;
    loops_->lanes.weigh(factor(s), f, f, c_ + a * L);
    loops_->dot_lanes(s.M, s.O, s.W, z, means_ + a * s.O * L);
  }
  // (9.2)
  void mix_row(const Store &s, Index a) {
    for (Index o = 0; o < s.O; ++o) {
      const T *const m = means_ + (a * s.O + o) * L, *const c = c_ + a * L;
      T mean = T(0), total = T(0);
      for (Index l = 0; l < L; ++l) mean += weights_[l] * m[l];
      for (Index l = 0; l < L; ++l) {
        total += weights_[l] * (s.noise(o, o, l) * (T(1) + c[l]) + (m[l] - mean) * (m[l] - mean));
      }
      mean_[a * s.O + o] = mean;
      total_[a * s.O + o] = total;
    }
  }
  bool in_range(const Store &s, Index a) const {
    if (!all_finite(total_ + a * s.O, s.O)) return false;
    return largest_magnitude(means_ + a * s.O * L, s.O * L, T(0)) < farthest() &&
           largest_magnitude(z_ + a * z_stride_, s.M, T(0)) < farthest() &&  // the prior is divided by its square
           largest_magnitude(c_ + a * L, L, T(0)) < kLargest<T>;
  }

  Judged learn_row(Store &s, Index a, const T *y, const T *given, MemberEvent &event) {
    const T *const z = z_ + a * z_stride_;
    T *const c = c_ + a * L, *const means = means_ + a * s.O * L, *const f = F_ + a * s.M * L;
    s.note_size(dot(z, z, s.M));
    T mixed = T(0);
    for (Index o = 0; o < s.O; ++o) {
      const T e = y[o] - mean_[a * s.O + o];
      mixed += bounded(e / total_[a * s.O + o] * e);
    }
    if (mixed > T(kSurprise) * T(s.O) && !s.suspicious()) begin_fresh(s, z, f, c, means);

    alignas(32) T nis[L], log_density[L], lambda[L], share[L], scale[L], weight[L];
    for (Index i = 0; i < s.O * L; ++i) error_[i] = y[i / L] - means[i];
    for (Index l = 0; l < L; ++l) judge(s, l, c[l], given, nis[l], log_density[l]);
    const T all = mixed_density(weights_, log_density, L);
    s.weigh_in(log_density, s.O, a == 0);
    for (Index l = 0; l < L; ++l) {  // the robust step, (8.3)
      const T most = T(kHuber) * T(s.O), noise = given == nullptr ? T(1) : relative_noise(s, l, given);
      weight[l] = nis[l] > most ? most / nis[l] : T(1);
      const T kept = noise / weight[l], q = kept + c[l];
      const bool learns = l != Store::kBefore && kept < kLargest<T>;  // or the sample is all noise
      lambda[l] = learns ? T(1) / q : T(0);
      share[l] = learns ? kept / q : T(1);
    }
    const bool last = a == rows_ - 1;
    loops_->rank_one_before(s.factor(), f, lambda, share, step_, last ? nullptr : z + z_stride_,
                            last ? nullptr : F_ + (a + 1) * s.M * L);
    const T *const gain = Step<T, L>(step_, s.M).gain;
    for (Index o = 0; o < s.O; ++o) {
      for (Index l = 0; l < L; ++l) scale[l] = error_[o * L + l] * lambda[l];
      loops_->lanes.add(s.M, s.W + o * s.M * L, scale, gain);
    }
    s.walk();
    if (given == nullptr) s.learn_noise(error_, weight, c);
    const MemberEvent found = s.decide();
    if (found.kind != KBT_NO_CHANGE) event = found;
    return {mixed, all};
  }

  // NIS and log density of member l, from its errors.
  void judge(const Store &s, Index l, T c, const T *given, T &nis, T &log_density) {
    T sum = T(0), logs = T(0);
    if (s.matrix) {
      T *const A = square_, *const x = square_ + s.O * s.O;
      for (Index i = 0; i < s.O; ++i) {
        for (Index k = 0; k <= i; ++k) {
          const T R = given == nullptr ? s.noise(i, k, l) : i == k ? given[i] : T(0);
          A[i * s.O + k] = R + s.noise(i, k, l) * c;
        }
        x[i] = error_[i * L + l];
      }
      cholesky(A, s.O, T(kNoiseFloor));
      solve_lower(A, s.O, x);
      for (Index i = 0; i < s.O; ++i) {
        sum += bounded(x[i] * x[i]);
        logs += T(2) * log_positive(A[i * s.O + i]);
      }
    } else {
      for (Index o = 0; o < s.O; ++o) {
        const T R = s.noise(o, o, l), var = (given == nullptr ? R : given[o]) + R * c, e = error_[o * L + l];
        sum += bounded(e / var * e);
        logs += log_positive(var);
      }
    }
    nis = sum;
    log_density = T(-0.5) * (sum + logs + T(1.8378770664093453) * T(s.O));
  }

  // The noise of this call in units of the member's own, averaged over the outputs.
  static T relative_noise(const Store &s, Index l, const T *given) {
    T sum = T(0);
    for (Index o = 0; o < s.O; ++o) sum += given[o] / s.noise(o, o, l);
    return sum / T(s.O);
  }

  // A sample that none of the members expected may be the first of a changed plant: the fresh member begins with it.
  void begin_fresh(Store &s, const T *z, T *f, T *c, T *means) {
    constexpr Index l = Store::kFresh;
    s.begin_fresh(true);
    for (Index p = 0; p < s.M; ++p) f[p * L + l] = z[p];
    c[l] = s.prior_of(l, s.size()) * dot(z, z, s.M);
    for (Index o = 0; o < s.O; ++o) {
      T sum = T(0);
      for (Index p = 0; p < s.M; ++p) sum += s.first(o, p) * z[p];
      means[o * L + l] = sum;
    }
  }

  Loops<T> loops_;
  Index rows_, z_stride_, outputs_;
  T *z_, *other_z_;     // rows x z_stride: (1, h), of the latest forward pass and the one before
  T *F_, *c_;           // rows x M x 8: U^T z; rows x 8: z^T P z
  T *means_, *error_;   // rows x O x 8; O x 8
  T *first_d_, *step_;  // M x 8; scratch of the rank-one step
  T *mean_, *total_;    // rows x O: the mixture
  T *square_;           // a noise matrix and a vector
  alignas(32) T weights_[L];
};

}  // namespace kbt
