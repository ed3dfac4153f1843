// readout.hpp - a softmax over many classes: a readout that is only read, a table of the rows that have learned, and
// one covariance for all of them. kbt_readout.h has the contract, method.md §10 the mathematics.
#pragma once

#include <utility>

#include "arena.hpp"
#include "kbt_readout.h"
#include "loops.hpp"
#include "softmax.hpp"

namespace kbt {

class Readout {
 public:
  using T = float;

  void plan(const kbt_readout_config &config, Arena &arena) {
    cfg = config;
    M_ = Index(cfg.d) + 1;
    stride_ = padded(M_);
    factor_.M = M_;
    factor_.d = arena.take<T>(stride_);
    factor_.u = arena.take<T>(ColumnUD<T>::u_count(M_));
    rows_ = arena.take<T>(held_room() * stride_);
    moved_ = arena.take<T>(held_room());
    class_of_ = arena.take<std::int32_t>(held_room());
    slot_of_ = arena.take<std::int32_t>(classes());
    z_ = arena.take<T>(stride_);
    other_z_ = arena.take<T>(stride_);
    f_ = arena.take<T>(stride_);
    step_ = arena.take<T>(ColumnUD<T>::step_count(M_));
    logits_ = arena.take<T>(classes());
    p_ = arena.take<T>(classes());
    top_ = arena.take<std::int32_t>(cfg.top);
    ones_ = arena.take<T>(kBlock);
  }
  void start(const T *weight, const T *bias) {
    weight_ = weight;
    bias_ = bias;
    loops_.choose();
    fill(ones_, T(1), kBlock);
    for (T *z : {z_, other_z_}) fill(z, T(0), stride_);
    fill(f_, T(0), stride_);
    reset();
  }
  void reset() {
    fill(factor_.u, T(0), ColumnUD<T>::u_count(M_));
    fill(factor_.d, T(0), stride_);
    for (Index p = 0; p < M_; ++p) factor_.d[p] = static_cast<T>(cfg.prior_var);
    fill(rows_, T(0), held_room() * stride_);
    for (Index c = 0; c < classes(); ++c) slot_of_[c] = -1;
    held = 0;
    samples = dropped = 0;
    predicted = false;
  }

  // ---- predict -----------------------------------------------------------------------------------------------------

  // Changes scratch only. Without h: at the input of the pass before the latest.
  kbt_status forward(const T *h) {
    before_ = predicted;
    predicted = false;
    std::swap(z_, other_z_);
    if (h != nullptr) set_input(h);
    loops_->project_column(factor_, z_, f_);
    fill(f_ + M_, T(0), stride_ - M_);
    loops_->column.weigh(factor_, f_, f_, &var_);
    for (Index c = 0; c < classes(); c += kBlock) readout_block(c, classes() - c < kBlock ? classes() - c : kBlock);
    for (Index s = 0; s < held; ++s) logits_[class_of_[s]] += dot(row(s), z_, stride_);
    kappa_ = moment_slope(var_);
    for (Index c = 0; c < classes(); ++c) p_[c] = kappa_ * logits_[c];
    if (!(var_ < kMost) || !all_finite(p_, classes())) return KBT_E_RANGE;
    softmax(p_, classes(), p_);
    predicted = true;
    return KBT_OK;
  }
  // The call that made the latest pass is rejected. Nothing was learned since the pass before it.
  void take_back() {
    if (before_) {
      forward(nullptr);
    } else {
      std::swap(z_, other_z_);
    }
  }
  const T *probabilities() const { return p_; }
  T var() const { return var_; }

  // ---- learn -------------------------------------------------------------------------------------------------------

  // The label of the latest pass.
  //
  // method.md (10.5), for the label, the most probable classes and all rows in the table. If other classes learned as
  // well, their logits at this input would move by -b p_c at most, which bounds what they could matter by (10.6).
  void learn(std::int32_t label, kbt_readout_result *result) {
    T widest = T(0), spread = T(0);
    const T tau = T(kReadoutSmoothing), whole = T(1) + T(classes()) * tau;
    for (Index c = 0; c < classes(); ++c) {
      const T q = (p_[c] + tau) / whole;
      widest = q > widest ? q : widest;
      spread += q * (T(1) - q);
    }
    if (widest > T(0.5)) spread = spread_beside(widest, tau, whole);
    const T share = kappa_ * kappa_ * var_ * widest / T(kMostExplained), s = share > T(1) ? share : T(1);
    const T lambda = kappa_ * kappa_ * (spread / T(classes())) / s, left = T(1) - lambda * var_;
    const T rate = kappa_ / s;

    loops_->column.rank_one(factor_, f_, &lambda, &left, false, step_);
    find_top();
    for (Index slot = 0; slot < held; ++slot) move(slot, label, rate);
    std::int64_t left_table = take_row(label, label, rate);
    for (Index k = 0; k < cfg.top; ++k) left_table += take_row(top_[k], label, rate);

    T likeliest_out = T(0);
    for (Index c = 0; c < classes(); ++c) {
      if (slot_of_[c] < 0 && p_[c] > likeliest_out) likeliest_out = p_[c];
    }
    if (result != nullptr) {
      const double b = static_cast<double>(moment_slope(var_ * left) * rate * var_),
                   p = static_cast<double>(likeliest_out);
      const T known = p_[label] > T(1e-30) ? p_[label] : T(1e-30);
      *result = {static_cast<double>(log_positive(known)), b * p / exp_negative(-b * p), left_table};
    }
    predicted = false;
    dropped += static_cast<std::uint64_t>(left_table);
    ++samples;
  }

  // ---- state -------------------------------------------------------------------------------------------------------

  // f(x, least) for every number of the factor.
  template <class F>
  void each_factor(F f) const {
    for (Index p = 0; p < M_; ++p) f(factor_.d[p], T(0));
    for (Index q = 1; q < M_; ++q) {
      for (Index p = 0; p < q; ++p) f(*factor_.entry(p, q), -kMost);
    }
  }
  T *row(Index slot) const { return rows_ + slot * stride_; }
  T &moved(Index slot) const { return moved_[slot]; }
  std::int32_t &class_at(Index slot) const { return class_of_[slot]; }
  Index width() const { return M_; }
  Index classes() const { return cfg.classes; }
  Index held_room() const { return cfg.held; }
  const T *weight() const { return weight_; }
  const T *bias() const { return bias_; }
  // After class_at was written.
  void index_rows() {
    for (Index c = 0; c < classes(); ++c) slot_of_[c] = -1;
    for (Index s = 0; s < held; ++s) slot_of_[class_of_[s]] = static_cast<std::int32_t>(s);
  }
  std::int32_t slot_of(Index c) const { return slot_of_[c]; }

  kbt_readout_config cfg;
  std::uint64_t samples, dropped;
  Index held;
  bool predicted;

 private:
  static constexpr Index kBlock = 512;
  static constexpr T kMost = 1e30F;
  static constexpr double kReadoutSmoothing = 1e-7;  // as everywhere: measurement.hpp

  void set_input(const T *h) {
    for (Index p = 0; p + 1 < M_; ++p) z_[p] = h[p];
    z_[M_ - 1] = T(1);
  }
  void readout_block(Index c, Index count) {
    VectorView<T> to = array(logits_ + c, count);
    const Index d = cfg.d;
    loops_->gated_rows_times(matrix<T>(weight_ + c * d, count, d, d), constant_view<T>(z_, d),
                             constant_view<T>(ones_, count), to);
    for (Index i = 0; bias_ != nullptr && i < count; ++i) logits_[c + i] += bias_[c + i];
  }
  // sum of q (1 - q) where one class has more than half: 1 - q of that one is the sum of the others.
  T spread_beside(T widest, T tau, T whole) const {
    T others = T(0), sum = T(0);
    bool found = false;
    for (Index c = 0; c < classes(); ++c) {
      const T q = (p_[c] + tau) / whole;
      if (!found && q == widest) {
        found = true;
      } else {
        others += q;
        sum += q * (T(1) - q);
      }
    }
    return sum + widest * others;
  }

  // The most probable classes, in order. First a heap with the least probable of them at its root.
  void find_top() {
    const auto better = [&](std::int32_t a, std::int32_t b) { return p_[a] > p_[b] || (p_[a] == p_[b] && a < b); };
    const auto sink = [&](Index at, Index count) {
      for (Index child = 2 * at + 1; child < count; at = child, child = 2 * at + 1) {
        if (child + 1 < count && better(top_[child], top_[child + 1])) ++child;
        if (!better(top_[at], top_[child])) return;
        std::swap(top_[at], top_[child]);
      }
    };
    const Index count = cfg.top;
    for (Index i = 0; i < count; ++i) top_[i] = static_cast<std::int32_t>(i);
    for (Index i = count / 2; i-- > 0;) sink(i, count);
    for (Index c = count; c < classes(); ++c) {
      if (!better(static_cast<std::int32_t>(c), top_[0])) continue;
      top_[0] = static_cast<std::int32_t>(c);
      sink(0, count);
    }
    for (Index end = count - 1; end > 0; --end) {
      std::swap(top_[0], top_[end]);
      sink(0, end);
    }
  }

  T error(Index c, std::int32_t label) const { return (c == label ? T(1) : T(0)) - p_[c]; }
  void move(Index slot, std::int32_t label, T rate) {
    const T e = error(class_of_[slot], label);
    loops_->axpy(row(slot), rate * e, step_, stride_);  // the step has left P z
    moved_[slot] += std::fabs(e);
  }
  // A class that is not in the table learns in a row of its own. If the table is full, the row that has moved least
  // leaves; if all have moved further than this class would, the class is left out, unless it is the label. Returns how
  // many left.
  std::int64_t take_row(std::int32_t c, std::int32_t label, T rate) {
    if (slot_of_[c] >= 0) return 0;
    const bool full = held == held_room();
    Index slot = held;
    if (full) {
      slot = 0;
      for (Index s = 1; s < held; ++s) {
        if (class_of_[s] != label && (class_of_[slot] == label || moved_[s] < moved_[slot])) slot = s;
      }
      if (c != label && moved_[slot] > std::fabs(error(c, label))) return 0;
      slot_of_[class_of_[slot]] = -1;
    } else {
      ++held;
    }
    slot_of_[c] = static_cast<std::int32_t>(slot);
    class_of_[slot] = c;
    moved_[slot] = T(0);
    fill(row(slot), T(0), stride_);
    move(slot, label, rate);
    return full ? 1 : 0;
  }

  Loops<T> loops_;
  Index M_, stride_;
  ColumnUD<T> factor_;
  const T *weight_, *bias_;
  T *rows_;                            // held x stride: what a row has learned, bias last
  T *moved_;                           // held: how far, as the sum of |y - p|
  std::int32_t *class_of_, *slot_of_;  // of a row; of a class, or -1
  T *z_, *other_z_, *f_, *step_;       // (h, 1) of the latest pass and of the one before
  T *logits_, *p_, *ones_;
  std::int32_t *top_;
  T var_, kappa_;
  bool before_;
};

}  // namespace kbt
