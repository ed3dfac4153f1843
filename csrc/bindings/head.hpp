// head.hpp - the Core of Python: a head with its arena, recorder and readers.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fastcall.hpp"
#include "kbt_flight.h"
#include "kbt_mailbox.h"
#include "kbt_policy.h"

namespace kbt::python {

// Memory aligned to KBT_ARENA_ALIGN.
struct FreeAligned {
  void operator()(void *p) const { ::operator delete (p, std::align_val_t{KBT_ARENA_ALIGN}); }
};
using Memory = std::unique_ptr<void, FreeAligned>;

// Between a head that learns and one reader.
class Mailbox {
 public:
  explicit Mailbox(const kbt_head *head);
  kbt_mailbox *get() const { return mailbox_; }

 private:
  Memory memory_;
  kbt_mailbox *mailbox_ = nullptr;
};

class Core {
 public:
  explicit Core(const kbt_config &cfg);

  py::object predict(const py::object &h);
  // y: plain targets, or int32 labels (softmax). h is None to observe the latest prediction.
  py::object learn(const py::object &h, const py::object &y, const py::object &noise);

  int set_prior(const py::array &weight, const py::array &bias, std::uint64_t seed);
  int set_means(const std::vector<py::array> &means);
  int set_noise(const py::array &noise);
  py::array noise() const;
  py::array mean(int layer) const;
  py::array cov(int layer) const;
  py::object predicted_cov();  // of the latest prediction, or the status with which it was rejected
  py::tuple counters() const;
  py::tuple health() const;
  py::tuple belief() const;
  py::list changes() const;
  int reset();
  int suppose_changed();

  // False: no memory for it. Replaces an earlier recorder and frees its memory.
  bool record_flight(std::uint32_t samples);
  void stop_flight();
  py::object flight_log() const;  // None: nothing is recorded
  // The status with which the log was rejected; or the steps, the first difference, the final hash and whether it was
  // reproduced.
  py::object replay(const py::bytes &log);

  py::bytes save() const;
  int load(const py::bytes &blob);

  // Post every later update to the mailbox, as long as a reader holds it.
  void post_to(const std::shared_ptr<Mailbox> &mailbox);
  void post() const;
  void take(const std::shared_ptr<Mailbox> &mailbox);

  // Run f on this head, without the GIL if the head is large. Meanwhile head() rejects calls from other threads.
  template <class F>
  kbt_status work(F f) {
    head();
    ++ticket_;
    if (bytes_ < kWorthUnlocking) return f();
    busy_ = true;
    kbt_status status;
    {
      const py::gil_scoped_release unlocked;
      status = f();
    }
    busy_ = false;
    return status;
  }
  kbt_head *head() const;
  kbt_head *unguarded() const { return head_; }

  // Differs after anything that may have replaced the latest prediction.
  std::uint64_t ticket() const { return ticket_; }
  // The policy that made the latest prediction, in its units; null: the head itself.
  const kbt_policy **latest() { return &latest_; }
  void set_one_row(bool one_row) { one_row_ = one_row; }

  const py::dtype &dtype() const { return dtype_; }
  py::ssize_t outputs() const { return outputs_; }
  std::uint64_t samples() const { return kbt_samples(head()); }
  int predicted_rows() const { return kbt_predicted_rows(head()); }
  bool one_row() const { return one_row_; }
  std::size_t nbytes() const { return bytes_; }
  const kbt_config &config() const { return cfg_; }

 private:
  // From this arena size an update takes longer (some 50 us) than handing the GIL to another thread and back.
  static constexpr std::size_t kWorthUnlocking = 1 << 19;

  const void *plain(const py::handle &object, py::ssize_t columns, py::ssize_t *rows) const;
  py::ssize_t width(int i) const { return cfg_.widths[i]; }

  Memory arena_, flight_memory_;
  std::vector<std::weak_ptr<Mailbox>> readers_;
  std::shared_ptr<Mailbox> taken_from_;  // holds what this head has learned
  std::size_t bytes_ = 0;
  bool busy_ = false;  // a thread works on the head without the GIL; written only with the GIL
  kbt_head *head_ = nullptr;
  kbt_flight *flight_ = nullptr;
  kbt_config cfg_{};
  py::dtype dtype_;
  py::ssize_t d_ = 0, outputs_ = 0;
  bool one_row_ = false;  // shape of the latest prediction, for observe
  const kbt_policy *latest_ = nullptr;
  std::uint64_t ticket_ = 0;
};

}  // namespace kbt::python
