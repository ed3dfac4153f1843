// abi.cpp - the C ABI called in any order with any numbers.
//
// The bytes choose a configuration, then calls. After each call these must hold:
//   - a call that was rejected (or gated, or only reads) left the state byte for byte as it was;
//   - what was learned is finite, and no variance is negative;
//   - what was predicted is finite, with variances that are not negative;
//   - a saved state, loaded into a second head, is saved to the same bytes;
//   - and so is one that came through a mailbox, in which the head then goes on;
//   - a copy made from the bytes of the head answers the call as the head does, bit by bit: status, results, the state
//     afterwards. If a prediction waits to be observed, the copy makes it first;
//   - a prediction waits until it is learned or rejected by the gate, or the state is replaced: no rejected call
//     and no call that only reads takes it away or changes what is learned from it.
// For the last two, every second call finds the scratch of the head full of NaN (see spoil).
// The arena and every buffer have exactly the size that the header promises to suffice, so that the address sanitizer
// sees the first byte too many.
//
// With KBT_PLAIN it is a program instead, which takes random bytes: abi STRUCTURE CALLS SEED (tools/fuzz.py copies).
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "fuzz.hpp"
#include "head.hpp"
#include "kbt.h"
#include "kbt_mailbox.h"

namespace {

struct Tally {
  unsigned long long calls = 0, rejected = 0, learned = 0, compared = 0;
  ~Tally() {
    std::fprintf(stderr, "abi: %llu calls, %llu rejected, %llu learned, %llu compared with a copy\n", calls, rejected,
                 learned, compared);
  }
} tally;

using Blob = std::vector<unsigned char>;

kbt_config configuration(fuzz::Bytes &in) {
  kbt_config cfg;
  kbt_config_default(&cfg, 1 + in.below(4), 1 + in.below(4));
  cfg.dtype = in.below(2);
  cfg.layers = 1 + in.below(3);
  for (int i = 1; i < cfg.layers; ++i) {
    cfg.widths[i + 1] = cfg.widths[i];
    cfg.widths[i] = in.below(4) == 0 ? 1 + in.below(8) : 2 * cfg.widths[0] + in.below(6);
  }
  cfg.max_rows = 1 + in.below(3);
  cfg.output = in.below(2);
  cfg.covariance = in.below(5) - 1;
  cfg.rule = in.below(4) == 0;
  cfg.noise = in.below(5);
  cfg.relu_order = 2 + in.below(3);
  cfg.softmax_order = in.below(3);
  const bool automatic = in.below(3) == 0;
  for (double &var : cfg.prior_var) var = automatic ? 0.0 : in.scale();
  cfg.noise_var = in.scale();
  cfg.input_var = in.below(3) == 0 ? in.scale() : 0.0;
  cfg.forgetting = in.below(2) ? 1.0 - in.byte() / 2000.0 : 1.0;
  cfg.gate = in.below(3) == 0 ? 9.0 : 0.0;
  const int drift = in.below(4);  // else KBT_DRIFT_AUTO: members or a bank
  if (drift < 2) cfg.drift = drift == 0 ? 0.0 : in.scale();
  if (in.rarely()) {  // any one of its numbers may be anything
    std::int32_t words[sizeof cfg / sizeof(std::int32_t)];
    std::memcpy(words, &cfg, sizeof cfg);
    words[in.byte() % (sizeof words / sizeof *words)] = in.raw<std::int32_t>();
    std::memcpy(&cfg, words, sizeof cfg);
  }
  return cfg;
}

template <class T>
class Session {
 public:
  Session(fuzz::Bytes &in, const kbt_config &cfg) : in_(in), cfg_(cfg), d_(cfg.widths[0]), n_(cfg.widths[cfg.layers]) {
    memory_ = fuzz::memory_of(kbt_arena_bytes(&cfg));
    REQUIRE(kbt_init(&cfg, memory_.get(), kbt_arena_bytes(&cfg), &head_) == KBT_OK);
    state_ = save(head_);
    const auto *head = static_cast<const kbt::Head<T> *>(head_);
    scratch_ = const_cast<T *>(head->learned()) + head->learned_bytes() / sizeof(T);
    const auto *end = static_cast<const unsigned char *>(memory_.get()) + kbt_arena_bytes(&cfg);
    used_.assign(static_cast<std::size_t>(reinterpret_cast<const T *>(end) - scratch_), false);
  }

  void run() {
    for (int i = 0; i < 64 && !in_.empty(); ++i) {
      spoil();
      const kbt_status status = call();
      ++tally.calls;
      const Blob after = save(head_);
      if (status == KBT_GATED || (status == KBT_OK && changes_ && !keeps_prediction_)) pending_.clear();
      REQUIRE(kbt_predicted_rows(head_) * d_ == static_cast<int>(pending_.size()));
      if (status != KBT_OK || !changes_) {
        tally.rejected += status != KBT_OK;
        REQUIRE(after == state_);
      }
      if (status == KBT_OK && changes_) check_state();
      state_ = after;
    }
  }

 private:
  kbt_status call() {
    changes_ = true;
    keeps_prediction_ = false;
    rows_ = in_.rarely() ? in_.raw<std::int32_t>() : 1 + in_.below(cfg_.max_rows);
    switch (in_.below(18)) {
      case 16: return both(kbt_reset);
      case 17: return suppose_changed();
      case 0: return set_prior();
      case 1: return set_means();
      case 2: return set_noise();
      case 3: return load_own();
      case 4: return load_damaged();
      case 5: return observe_labels();
      case 6: return update_labels();
      case 7:
      case 8: return observe();
      case 9:
      case 10:
      case 11: return predict();
      default: return update();
    }
  }

  kbt_status set_prior() {
    const T *weight = numbers(n_ * d_), *bias = in_.below(2) ? numbers(n_) : nullptr;
    const std::uint64_t seed = in_.byte();
    return both([&](kbt_head *head) { return kbt_set_prior(head, weight, bias, seed); });
  }
  kbt_status set_noise() {
    const T *R = noise();
    keeps_prediction_ = true;
    const kbt_status status = both([&](kbt_head *head) { return kbt_set_noise(head, R, count_); });
    if (status == KBT_OK && kbt_predicted_rows(head_) == 0) pending_.clear();  // it would overflow
    return status;
  }
  kbt_status suppose_changed() {
    keeps_prediction_ = kbt_samples(head_) == 0;  // nothing to change
    return both(kbt_suppose_changed);
  }
  kbt_status predict() {
    changes_ = false;
    const T *h = numbers(allowed_rows() * d_);
    const std::size_t K = static_cast<std::size_t>(allowed_rows() * n_);
    const bool want_cov = in_.below(4) != 0, want_var = in_.below(4) != 0, null = in_.rarely();
    const kbt_status status = both([&](kbt_head *head) {
      std::vector<T> mean(K), cov(K * K), var(K);
      const kbt_status answer = kbt_predict(head, null ? nullptr : h, rows_, mean.data(),
                                            want_cov ? cov.data() : nullptr, want_var ? var.data() : nullptr);
      for (std::size_t i = 0; answer == KBT_OK && i < K; ++i) {
        REQUIRE(finite(mean[i]) && finite(var[i]) && var[i] >= T(0) && cov[i * K + i] >= T(0));
        for (std::size_t k = 0; k < K; ++k) REQUIRE(finite(cov[i * K + k]));
      }
      for (const std::vector<T> &part : {mean, cov, var}) told_.insert(told_.end(), part.begin(), part.end());
      return answer;
    });
    if (status == KBT_OK) pending_.assign(h, h + rows_ * d_);
    return status;
  }
  kbt_status update() {
    const T *h = numbers(allowed_rows() * d_), *y = targets(allowed_rows());
    const T *R = in_.below(4) == 0 ? noise() : nullptr;
    return learned([&](kbt_head *head, kbt_result *result) {
      return kbt_update(head, h, rows_, y, R, R != nullptr ? count_ : 0, result);
    });
  }
  kbt_status observe() {
    const T *y = targets(kbt_predicted_rows(head_));
    const T *R = in_.below(4) == 0 ? noise() : nullptr;
    const bool want_result = in_.below(4) != 0;
    return learned([&](kbt_head *head, kbt_result *result) {
      return kbt_observe(head, y, R, R != nullptr ? count_ : 0, want_result ? result : nullptr);
    });
  }
  kbt_status update_labels() {
    const T *h = numbers(allowed_rows() * d_);
    const std::int32_t *classes = labels(allowed_rows());
    return learned([&](kbt_head *head, kbt_result *result) {
      return kbt_update_labels(head, h, rows_, classes, nullptr, 0, result);
    });
  }
  kbt_status observe_labels() {
    const std::int32_t *classes = labels(kbt_predicted_rows(head_));
    return learned(
        [&](kbt_head *head, kbt_result *result) { return kbt_observe_labels(head, classes, nullptr, 0, result); });
  }
  kbt_status set_means() {
    const void *means[KBT_MAX_LAYERS];
    for (int i = 0; i < cfg_.layers; ++i) means[i] = numbers(cfg_.widths[i + 1] * (cfg_.widths[i] + 1));
    if (in_.rarely()) means[in_.below(cfg_.layers)] = nullptr;
    return both([&](kbt_head *head) { return kbt_set_means(head, means); });
  }
  kbt_status load_own() {  // into this head and into a second one: the same bytes come out of both
    const fuzz::Memory memory = fuzz::memory_of(kbt_arena_bytes(&cfg_));
    const kbt_head *twin = copy_in(memory);
    REQUIRE(save(twin) == state_);
    changes_ = false;
    pending_.clear();
    return rows_ % 2 == 0 ? take_from(twin) : kbt_state_load(head_, state_.data(), state_.size());
  }
  kbt_status take_from(const kbt_head *twin) {
    const std::size_t bytes = kbt_mailbox_bytes(twin);
    fuzz::Memory memory = fuzz::memory_of(bytes);
    kbt_mailbox *mailbox = nullptr;
    REQUIRE(kbt_mailbox_init(twin, memory.get(), bytes, &mailbox) == KBT_OK);
    const kbt_status status = kbt_take(head_, mailbox);
    std::swap(mailbox_, memory);  // where the head's numbers were before may go
    return status;
  }
  kbt_status load_damaged() {
    Blob blob = state_;
    blob[in_.raw<std::uint16_t>() % blob.size()] ^= static_cast<unsigned char>(1 + in_.below(255));
    const kbt_status status = kbt_state_load(head_, blob.data(), blob.size());
    REQUIRE(status != KBT_OK);
    return status;
  }

  template <class Call>
  kbt_status learned(Call call) {
    const kbt_status status = both([&](kbt_head *head) {
      kbt_result result{0.0, 0.0};
      const kbt_status answer = call(head, &result);
      if (answer == KBT_OK) REQUIRE(finite(result.nis) && finite(result.log_likelihood));
      results_.insert(results_.end(), {result.nis, result.log_likelihood});
      return answer;
    });
    tally.learned += status == KBT_OK;
    return status;
  }

  // ---- the head and a copy of it ------------------------------------------------------------------------------------

  // A head of its own, with the state that this one has.
  kbt_head *copy_in(const fuzz::Memory &memory) const {
    kbt_head *copy = nullptr;
    REQUIRE(kbt_init(&cfg_, memory.get(), kbt_arena_bytes(&cfg_), &copy) == KBT_OK);
    REQUIRE(kbt_state_load(copy, state_.data(), state_.size()) == KBT_OK);
    return copy;
  }

  // Makes a call of the head and of a copy, which must answer the same.
  template <class Call>
  kbt_status both(Call call) {
    const fuzz::Memory memory = fuzz::memory_of(kbt_arena_bytes(&cfg_));
    kbt_head *copy = copy_in(memory);
    if (!pending_.empty()) {
      const int rows = static_cast<int>(pending_.size()) / d_;
      std::vector<T> mean(static_cast<std::size_t>(rows * n_));
      REQUIRE(kbt_predict(copy, pending_.data(), rows, mean.data(), nullptr, nullptr) == KBT_OK);
    }
    told_.clear();
    results_.clear();
    const kbt_status status = call(head_);
    const std::vector<T> told = std::exchange(told_, {});
    const std::vector<double> results = std::exchange(results_, {});
    REQUIRE(call(copy) == status);
    REQUIRE(same_bits(told, told_) && same_bits(results, results_));
    REQUIRE(save(copy) == save(head_));
    REQUIRE(kbt_predicted_rows(copy) == kbt_predicted_rows(head_));
    ++tally.compared;
    return status;
  }

  template <class U>
  static bool same_bits(const std::vector<U> &a, const std::vector<U> &b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(U)) == 0);
  }

  // Every second time, and unless a prediction waits there: overwrites with NaN whatever the head keeps behind its
  // learned numbers, but for numbers that have been zero ever since kbt_init. On those, which pad rows, the core
  // relies.
  void spoil() {
    for (std::size_t i = 0; i < used_.size(); ++i) used_[i] = used_[i] || scratch_[i] != T(0);
    spoils_ = !spoils_;
    if (!spoils_ || !pending_.empty()) return;
    for (std::size_t i = 0; i < used_.size(); ++i) {
      if (used_[i]) scratch_[i] = std::numeric_limits<T>::quiet_NaN();
    }
  }

  // ---- what goes in, in buffers of exactly its size
  // ------------------------------------------------------------------

  int allowed_rows() const { return rows_ < 1 || rows_ > cfg_.max_rows ? 1 : rows_; }
  const T *numbers(int count) {
    buffers_[next_ %= 16].assign(static_cast<std::size_t>(count), T(0));
    buffers_[next_].shrink_to_fit();
    const bool calm = in_.below(4) != 0;  // else hardly any call gets beyond its first check
    for (T &x : buffers_[next_]) x = calm ? in_.sane<T>() : in_.number<T>();
    return buffers_[next_++].data();
  }
  const T *targets(int rows) {
    if (rows < 1) rows = 1;
    if (cfg_.output == KBT_GAUSSIAN || in_.rarely()) return numbers(rows * n_);
    T *y = const_cast<T *>(numbers(rows * n_));
    for (int i = 0; i < rows * n_; ++i) y[i] = T(0);
    for (int a = 0; a < rows; ++a) y[a * n_ + in_.below(n_)] = T(1);
    return y;
  }
  const std::int32_t *labels(int rows) {
    labels_.assign(static_cast<std::size_t>(rows < 1 ? 1 : rows), 0);
    for (std::int32_t &label : labels_) label = in_.rarely() ? in_.raw<std::int32_t>() : in_.below(n_);
    return labels_.data();
  }
  const T *noise() {
    const int counts[] = {1, n_, n_ * n_};
    count_ = counts[in_.below(3)];
    T *R = const_cast<T *>(numbers(count_));
    if (in_.below(4) != 0) {  // a covariance, made from what came
      for (int i = 0; i < count_; ++i) R[i] = R[i] < T(0) ? -R[i] : R[i];
      for (int i = 0; count_ == n_ * n_ && i < count_; ++i) R[i] = i % (n_ + 1) == 0 ? R[i] : T(0);
    }
    if (in_.rarely()) count_ = in_.byte() % 2 ? -1 : count_ + 1;
    if (count_ > static_cast<int>(buffers_[next_ - 1].size()))
      buffers_[next_ - 1].resize(static_cast<std::size_t>(count_));
    return buffers_[next_ - 1].data();
  }

  // ---- what must hold
  // ------------------------------------------------------------------------------------------------

  template <class U>
  static bool finite(U x) {
    return x - x == U(0);
  }
  static Blob save(const kbt_head *head) {
    Blob blob(kbt_state_size(head));
    REQUIRE(kbt_state_save(head, blob.data(), blob.size()) == KBT_OK);
    return blob;
  }
  void check_state() const {
    for (int i = 0; i < cfg_.layers; ++i) {
      std::vector<T> mean(static_cast<std::size_t>(cfg_.widths[i + 1] * (cfg_.widths[i] + 1)));
      REQUIRE(kbt_get_mean(head_, i, mean.data()) == KBT_OK);
      for (const T x : mean) REQUIRE(finite(x));
    }
    kbt_health health;
    REQUIRE(kbt_get_health(head_, &health) == KBT_OK);
    REQUIRE(health.smallest_var >= 0.0 && finite(health.largest_var));
    std::vector<T> R(static_cast<std::size_t>(n_ * n_));
    std::int32_t count = 0;
    REQUIRE(kbt_get_noise(head_, R.data(), &count) == KBT_OK);
    for (int i = 0; i < count; ++i) REQUIRE(finite(R[static_cast<std::size_t>(i)]));
  }

  fuzz::Bytes &in_;
  const kbt_config cfg_;
  const int d_, n_;
  fuzz::Memory memory_, mailbox_;
  kbt_head *head_ = nullptr;
  Blob state_;
  std::vector<T> pending_;  // h of the prediction that waits to be observed
  std::vector<T> told_;     // what predict has answered
  std::vector<double> results_;
  T *scratch_ = nullptr;    // from here to the end of the arena: nothing that is learned
  std::vector<bool> used_;  // of the scratch: has been something else than zero
  bool spoils_ = false, changes_ = true, keeps_prediction_ = false;
  std::int32_t rows_ = 1, count_ = 0;
  std::vector<T> buffers_[16];
  std::vector<std::int32_t> labels_;
  std::size_t next_ = 0;
};

int structure = -1;  // of all heads, where the command line says so

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
  fuzz::Bytes in(data, size);
  kbt_config cfg = configuration(in);
  if (structure >= 0) cfg.covariance = structure;
  const std::size_t bytes = kbt_arena_bytes(&cfg);
  const kbt_status status = kbt_config_check(&cfg, nullptr);
  REQUIRE((status == KBT_OK) == (bytes != 0));
  constexpr std::size_t kLargest = std::size_t{1} << 17;  // small heads have the same code, and take more calls
  if (bytes == 0 || bytes > kLargest) return 0;
  if (in.rarely()) {  // one byte too few
    const fuzz::Memory memory = fuzz::memory_of(bytes - 1);
    kbt_head *head = nullptr;
    REQUIRE(kbt_init(&cfg, memory.get(), bytes - 1, &head) == KBT_E_SIZE && head == nullptr);
  }
  if (cfg.dtype == KBT_FLOAT64) {
    Session<double>(in, cfg).run();
  } else {
    Session<float>(in, cfg).run();
  }
  return 0;
}

#ifdef KBT_PLAIN
int main(int count, char **words) {
  if (count != 4) return 2;
  structure = std::atoi(words[1]);
  const unsigned long long calls = std::strtoull(words[2], nullptr, 10);
  std::uint64_t random = std::strtoull(words[3], nullptr, 10);
  while (tally.compared < calls) {
    std::uint8_t bytes[2048];
    for (std::uint8_t &byte : bytes) {  // Knuth's MMIX generator; its high bits are the good ones
      random = random * 6364136223846793005ULL + 1442695040888963407ULL;
      byte = static_cast<std::uint8_t>(random >> 56);
    }
    LLVMFuzzerTestOneInput(bytes, sizeof bytes);
  }
  return 0;
}
#endif
