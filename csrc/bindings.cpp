// bindings.cpp - Python's door to the C ABI. Thin: it owns the arena and moves arrays; kbt_edge/head.py explains
// errors.
//
// The verbs take plain arrays only (right dtype, C-contiguous, aligned). They answer
//   None        an argument is not of that form, and nothing has run: the caller converts it and calls again,
//   an int      the status with which the core refused, or one of the negative ones below,
//   a record    the result, of the types that set_results was given.
// So a control loop that passes plain arrays pays for one check, and every message is written in Python. The verbs are
// called without pybind11's argument parsing (`fast` below), which would take as long as a small head.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "bench_loop.hpp"
#include "head.hpp"
#include "kbt.h"
#include "kbt_flight.h"
#include "kbt_mailbox.h"

namespace py = pybind11;

#if defined(__clang__)
#define KBT_COMPILER "clang " __clang_version__
#else
#define KBT_COMPILER "gcc " __VERSION__
#endif

// The file is built for size, as most of it is pybind11's. What a control loop calls is not.
#if !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O2")
#endif

namespace {

// Why a verb was refused before the head saw anything.
constexpr int kTrunkInput = -1;   // the trunk refused a value of its input
constexpr int kTrunkOutput = -2;  // the trunk's output is not finite
constexpr int kOtherOwner = -3;   // observe: the latest prediction was made by somebody else, in other units

// An array and nothing that only claims to be one: a masked array hides entries that the core would read.
bool is_array(const py::handle &object) {
  const void *type = Py_TYPE(object.ptr()), *array_type = py::detail::npy_api::get().PyArray_Type_;
  return type == array_type;
}
template <class T>
bool is_array_of(const py::handle &object) {
  return is_array(object) && py::isinstance<py::array_t<T>>(object);
}

// The NamedTuples of kbt_edge/head.py, its error, and the words of an Update's status. They live as long as the
// process.
struct Results {
  PyTypeObject *prediction = &PyTuple_Type, *update = &PyTuple_Type;
  PyObject *error = PyExc_RuntimeError;
  PyObject *ok = PyUnicode_InternFromString("ok"), *gated = PyUnicode_InternFromString("gated");
};
Results &results() {
  static Results found;
  return found;
}

// A tuple of the given type, filled as tuple.__new__ would.
py::object record(PyTypeObject *type, py::object a, py::object b, py::object c) {
  auto tuple = py::reinterpret_steal<py::object>(type->tp_alloc(type, 3));
  if (!tuple) throw py::error_already_set();
  PyTuple_SET_ITEM(tuple.ptr(), 0, a.release().ptr());
  PyTuple_SET_ITEM(tuple.ptr(), 1, b.release().ptr());
  PyTuple_SET_ITEM(tuple.ptr(), 2, c.release().ptr());
  return tuple;
}
py::object update_record(bool gated, double nis, double log_likelihood) {
  return record(results().update, py::reinterpret_borrow<py::object>(gated ? results().gated : results().ok),
                py::float_(nis), py::float_(log_likelihood));
}

// A new array of one or two dimensions. rows < 0: a vector.
py::array new_array(const py::dtype &dtype, py::ssize_t rows, py::ssize_t columns) {
  const auto &api = py::detail::npy_api::get();
  const py::ssize_t shape[] = {rows, columns};
  PyObject *array = api.PyArray_NewFromDescr_(api.PyArray_Type_, py::dtype(dtype).release().ptr(), rows < 0 ? 1 : 2,
                                              rows < 0 ? shape + 1 : shape, nullptr, nullptr, 0, nullptr);
  if (array == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::array>(array);
}

// A method without pybind11's dispatch: N positional arguments, handed on as they are.
template <class Class, auto kMethod, std::size_t... I>
PyObject *call(PyObject *self, PyObject *const *arguments, Py_ssize_t count, std::index_sequence<I...>) {
  if (count != static_cast<Py_ssize_t>(sizeof...(I))) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", static_cast<Py_ssize_t>(sizeof...(I)), count);
    return nullptr;
  }
  const auto *instance = reinterpret_cast<py::detail::instance *>(self);
  auto *object = instance->simple_layout ? static_cast<Class *>(instance->simple_value_holder[0]) : nullptr;
  if (object == nullptr) {
    PyErr_SetString(PyExc_TypeError, "the object was never initialised");
    return nullptr;
  }
  try {
    return (object->*kMethod)(py::reinterpret_borrow<py::object>(arguments[I])...).release().ptr();
  } catch (py::error_already_set &error) {
    error.restore();
  } catch (const std::bad_alloc &) {
    PyErr_NoMemory();
  }
  return nullptr;
}
template <class Class, auto kMethod, std::size_t N>
PyObject *entry(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  return call<Class, kMethod>(self, arguments, count, std::make_index_sequence<N>());
}
template <class Class, auto kMethod, std::size_t N>
void fast(py::class_<Class> &type, const char *name) {
  static PyMethodDef definition = {
      name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&entry<Class, kMethod, N>)), METH_FASTCALL,
      nullptr};
  type.attr(name) =
      py::reinterpret_steal<py::object>(PyDescr_NewMethod(reinterpret_cast<PyTypeObject *>(type.ptr()), &definition));
}

// Memory aligned as the core asks for.
struct FreeAligned {
  void operator()(void *p) const { ::operator delete (p, std::align_val_t{KBT_ARENA_ALIGN}); }
};
using Memory = std::unique_ptr<void, FreeAligned>;
Memory aligned_memory(std::size_t bytes) {
  return Memory(::operator new (bytes, std::align_val_t{KBT_ARENA_ALIGN}));
}

// Between a head that learns and one reader.
class Mailbox {
 public:
  explicit Mailbox(const kbt_head *head) : memory_(aligned_memory(kbt_mailbox_bytes(head))) {
    kbt_mailbox_init(head, memory_.get(), kbt_mailbox_bytes(head), &mailbox_);
  }
  kbt_mailbox *get() const { return mailbox_; }

 private:
  Memory memory_;
  kbt_mailbox *mailbox_ = nullptr;
};

// The arena from which an update takes longer (some 50 us) than handing the interpreter to another thread and back.
constexpr std::size_t kWorthUnlocking = 1 << 19;

class Core {
 public:
  explicit Core(const kbt_config &cfg) {
    const std::size_t bytes = kbt_arena_bytes(&cfg);
    if (bytes == 0) throw py::value_error("the configuration is refused; check it with Config.check first");
    arena_ = aligned_memory(bytes);
    bytes_ = bytes;
    const kbt_status status = kbt_init(&cfg, arena_.get(), bytes, &head_);
    if (status != KBT_OK) throw py::value_error(kbt_status_str(status));
    kbt_get_config(head_, &cfg_);
    dtype_ = cfg_.dtype == KBT_FLOAT64 ? py::dtype::of<double>() : py::dtype::of<float>();
    d_ = cfg_.widths[0];
    outputs_ = cfg_.widths[cfg_.layers];
  }

  // Pointer to the data of a plain array with one of the given shapes, else null.
  const void *plain(const py::handle &object, py::ssize_t columns, py::ssize_t *rows) const {
    if (!is_array(object)) return nullptr;
    const auto array = py::reinterpret_borrow<py::array>(object);
    constexpr int kPlain = py::array::c_style | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
    if ((array.flags() & kPlain) != kPlain || !array.dtype().is(dtype_)) return nullptr;
    const int ndim = static_cast<int>(array.ndim());
    if (ndim < 1 || ndim > 2 || array.shape(ndim - 1) != columns) return nullptr;
    *rows = ndim == 2 ? array.shape(0) : -1;  // -1: a single row without its own axis
    return array.data();
  }

  // owner: who asks, and therefore who may observe: kHead, or a number from new_owner.
  py::object predict(const py::object &h, const py::object &owner) {
    py::ssize_t rows = 0;
    const void *input = plain(h, d_, &rows);
    if (input == nullptr) return py::none();
    const py::ssize_t count = rows < 0 ? 1 : rows, K = count * outputs_;
    if (count < 1 || count > cfg_.max_rows) return py::int_(static_cast<int>(KBT_E_ROWS));
    py::array mean = new_array(dtype_, rows, outputs_), cov = new_array(dtype_, K, K);
    py::array total_var = new_array(dtype_, rows, outputs_);
    void *const to[] = {mean.mutable_data(), cov.mutable_data(), total_var.mutable_data()};
    const kbt_status status =
        work([&] { return kbt_predict(head_, input, static_cast<int32_t>(count), to[0], to[1], to[2]); });
    if (status != KBT_OK) return py::int_(static_cast<int>(status));
    predicted(rows < 0, number(owner));
    return record(results().prediction, std::move(mean), std::move(cov), std::move(total_var));
  }

  // y: plain targets, or int32 labels (softmax). h is None to observe the latest prediction.
  py::object learn(const py::object &h, const py::object &y, const py::object &noise, const py::object &owner) {
    py::ssize_t rows = one_row_ ? -1 : kbt_predicted_rows(head()), noise_rows = 0, noise_count = 0;
    const void *input = nullptr;
    if (!h.is_none()) {
      input = plain(h, d_, &rows);
      if (input == nullptr) return py::none();
      if (rows == 0 || rows > cfg_.max_rows) return py::int_(static_cast<int>(KBT_E_ROWS));
    } else if (const int refused = cannot_observe(number(owner))) {
      return py::int_(refused);
    }
    const int32_t count = static_cast<int32_t>(rows < 0 ? 1 : rows);
    const void *R = nullptr;
    if (!noise.is_none()) {  // (1,), (d_o,) or (d_o, d_o)
      if (!is_array(noise)) return py::none();
      const auto array = py::reinterpret_borrow<py::array>(noise);
      noise_count = array.size();
      const bool vector = array.ndim() == 1 && (noise_count == 1 || noise_count == outputs_);
      const bool matrix = array.ndim() == 2 && array.shape(0) == outputs_ && array.shape(1) == outputs_;
      if (!(vector || matrix)) return py::none();
      R = plain(noise, array.shape(array.ndim() - 1), &noise_rows);
      if (R == nullptr) return py::none();
    }
    kbt_status status = KBT_OK;
    kbt_result result{0.0, 0.0};
    const auto nc = static_cast<int32_t>(noise_count);
    if (is_array_of<int32_t>(y) && cfg_.output == KBT_SOFTMAX) {
      const auto labels = py::reinterpret_borrow<py::array>(y);
      constexpr int kPlain = py::array::c_style | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
      const bool shaped = rows < 0 ? labels.ndim() == 0 : labels.ndim() == 1 && labels.size() == rows;
      if ((labels.flags() & kPlain) != kPlain || !shaped) return py::none();
      const auto *data = static_cast<const int32_t *>(labels.data());
      status = work([&] {
        return input != nullptr ? kbt_update_labels(head_, input, count, data, R, nc, &result)
                                : kbt_observe_labels(head_, data, R, nc, &result);
      });
    } else {
      py::ssize_t target_rows = 0;
      const void *target = plain(y, outputs_, &target_rows);
      if (target == nullptr || target_rows != rows) return py::none();
      status = work([&] {
        return input != nullptr ? kbt_update(head_, input, count, target, R, nc, &result)
                                : kbt_observe(head_, target, R, nc, &result);
      });
    }
    if (status != KBT_OK && status != KBT_GATED) return py::int_(static_cast<int>(status));
    post();
    return update_record(status == KBT_GATED, result.nis, result.log_likelihood);
  }

  int set_prior(const py::array &weight, const py::array &bias, std::uint64_t seed) {
    return kbt_set_prior(head(), weight.data(), bias.data(), seed);
  }
  int set_means(const std::vector<py::array> &means) {
    std::array<const void *, KBT_MAX_LAYERS> pointers{};
    for (std::size_t i = 0; i < means.size() && i < pointers.size(); ++i) pointers[i] = means[i].data();
    return kbt_set_means(head(), pointers.data());
  }
  int set_noise(const py::array &noise) {
    const kbt_status status = kbt_set_noise(head(), noise.data(), static_cast<int32_t>(noise.size()));
    post();
    return status;
  }

  py::array noise() const {
    py::array all(dtype_, std::vector<py::ssize_t>{outputs_, outputs_});
    int32_t count = 0;
    kbt_get_noise(head(), all.mutable_data(), &count);
    if (count == outputs_ * outputs_ && outputs_ > 1) return all;
    return py::array(dtype_, std::vector<py::ssize_t>{outputs_}, all.data());
  }
  py::array mean(int layer) const {
    const py::ssize_t n = width(layer + 1), m = width(layer) + 1;
    py::array out(dtype_, std::vector<py::ssize_t>{n, m});
    kbt_get_mean(head(), layer, out.mutable_data());
    return out;
  }
  py::array cov(int layer) const {
    const py::ssize_t n = width(layer + 1), m = width(layer) + 1;
    std::vector<py::ssize_t> shape{n, m, m};
    if (cfg_.covariance == KBT_FULL) shape = {n * m, n * m};
    if (cfg_.covariance == KBT_DIAGONAL) shape = {n, m};
    py::array out(dtype_, shape);
    kbt_get_cov(head(), layer, out.mutable_data());
    return out;
  }
  py::tuple factor_range(int layer) const {
    double smallest = 0.0, largest = 0.0;
    kbt_get_factor_range(head(), layer, &smallest, &largest);
    return py::make_tuple(smallest, largest);
  }
  py::tuple counters() const {
    kbt_counters c{};
    kbt_get_counters(head(), &c);
    return py::make_tuple(c.rejected, c.gated, c.floored);
  }

  py::tuple health() const {
    kbt_health h{};
    kbt_get_health(head(), &h);
    return py::make_tuple(static_cast<int>(h.verdict), h.seen, h.average, h.low, h.high, h.gated, h.smallest_var,
                          h.largest_var);
  }

  // Whether there was memory for it. The recorder before it is let go, and its memory with it.
  bool record_flight(std::uint32_t samples) {
    const std::size_t bytes = kbt_flight_bytes(&cfg_, samples);
    if (bytes == 0) return false;
    Memory memory = aligned_memory(bytes);
    if (kbt_flight_init(head(), memory.get(), bytes, samples, &flight_) != KBT_OK) return false;
    flight_memory_ = std::move(memory);
    return true;
  }
  void stop_flight() {
    kbt_flight_stop(head());
    flight_ = nullptr;
    flight_memory_.reset();
  }
  py::object flight_log() const {  // None: nothing is recorded
    head();
    if (flight_ == nullptr) return py::none();
    std::string log;
    log.reserve(kbt_flight_log_size(flight_));
    kbt_flight_log(
        flight_,
        [](void *to, const void *bytes, std::size_t count) {
          static_cast<std::string *>(to)->append(static_cast<const char *>(bytes), count);
        },
        &log);
    return py::bytes(log);
  }
  // The status that refused the log; or the steps, the first difference, the final hash and whether it was reproduced.
  py::object replay(const py::bytes &log) {
    using Steps = std::vector<kbt_flight_step>;
    const std::string_view view = log;
    kbt_flight_info info{};
    kbt_status status = kbt_flight_check(view.data(), view.size(), &info);
    if (status != KBT_OK) return py::int_(static_cast<int>(status));
    const Memory memory = aligned_memory(info.replay_bytes);
    Steps steps;
    steps.reserve(info.records);
    kbt_flight_outcome outcome{};
    status = kbt_flight_replay(
        view.data(), view.size(), head(), memory.get(), info.replay_bytes,
        [](void *to, const kbt_flight_step *step) { static_cast<Steps *>(to)->push_back(*step); }, &steps, &outcome);
    if (status != KBT_OK) return py::int_(static_cast<int>(status));
    py::list rows;
    for (const kbt_flight_step &step : steps) {
      rows.append(py::make_tuple(step.kind, static_cast<int>(step.recorded), static_cast<int>(step.status),
                                 step.recorded_samples, step.samples, step.recorded_nis, step.nis, step.same != 0));
    }
    return py::make_tuple(rows, outcome.first_difference, outcome.final_hash, outcome.reproduced != 0);
  }

  py::bytes save() const {
    std::vector<char> blob(kbt_state_size(head()));
    kbt_state_save(head(), blob.data(), blob.size());
    return py::bytes(blob.data(), blob.size());
  }
  int load(const py::bytes &blob) {
    const std::string_view view = blob;
    const kbt_status status = kbt_state_load(head(), view.data(), view.size());
    post();
    return status;
  }

  // From now on, whatever this head learns is posted there, as long as somebody keeps the mailbox.
  void post_to(const std::shared_ptr<Mailbox> &mailbox) {
    readers_.erase(std::remove_if(readers_.begin(), readers_.end(), [](const auto &box) { return box.expired(); }),
                   readers_.end());
    readers_.push_back(mailbox);
  }
  void post() const {
    for (const auto &reader : readers_) {
      if (const auto mailbox = reader.lock()) kbt_post(head_, mailbox->get());
    }
  }
  void take(const std::shared_ptr<Mailbox> &mailbox) {
    if (kbt_take(head(), mailbox->get()) == KBT_OK && taken_from_ != mailbox) taken_from_ = mailbox;
  }

  // A prediction belongs to whoever asked for it, as only that one knows its units: the head itself or a model.
  static constexpr long kHead = 0;
  long new_owner() { return ++owners_; }
  void predicted(bool one_row, long owner) {
    one_row_ = one_row;
    owner_ = owner;
  }
  int cannot_observe(long owner) const {
    if (kbt_predicted_rows(head()) == 0) return KBT_E_ORDER;
    return owner == owner_ ? 0 : kOtherOwner;
  }
  // Differs after anything that may have replaced the latest prediction.
  std::uint64_t ticket() const { return ticket_; }

  // The core's work on this head: without the interpreter where that pays. Meanwhile head() refuses other threads.
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
  kbt_head *unguarded() const { return head_; }
  kbt_head *head() const {
    if (!busy_) return head_;
    PyErr_SetString(results().error,
                    "head: expected one thread at a time, got a call while another thread is in one; give each thread "
                    "that predicts its own head.reader()");
    throw py::error_already_set();
  }
  py::ssize_t outputs() const { return outputs_; }

  std::uint64_t samples() const { return kbt_samples(head()); }
  int predicted_rows() const { return kbt_predicted_rows(head()); }
  bool one_row() const { return one_row_; }
  std::size_t nbytes() const { return bytes_; }
  const kbt_config &config() const { return cfg_; }

 private:
  py::ssize_t width(int i) const { return cfg_.widths[i]; }
  static long number(const py::object &owner) {
    const long found = PyLong_AsLong(owner.ptr());
    if (found == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return found;
  }

  Memory arena_, flight_memory_;
  std::vector<std::weak_ptr<Mailbox>> readers_;
  std::shared_ptr<Mailbox> taken_from_;  // holds what this head has learned
  std::size_t bytes_ = 0;
  bool busy_ = false;  // a thread works on the head without the interpreter; written only with it
  kbt_head *head_ = nullptr;
  kbt_flight *flight_ = nullptr;
  kbt_config cfg_{};
  py::dtype dtype_;
  py::ssize_t d_ = 0, outputs_ = 0;
  bool one_row_ = false;  // shape of the latest prediction, for observe
  long owner_ = kHead, owners_ = kHead;
  std::uint64_t ticket_ = 0;
};

// One control step in physical units with a single crossing into C per verb: (x - mean) / scale, the compiled trunk,
// the head, and back. For float32 gaussian heads; a trunk without a C function, or with several inputs, enters at
// predict_rows.
class Pipeline {
 public:
  using TrunkFunction = int (*)(const void *const *inputs, float *output);
  using Doubles = std::vector<double>;

  // x, h: the trunk's own float32 buffers, whose memory the caller keeps alive and in place.
  Pipeline(Core &core, long owner, std::uintptr_t trunk, py::array_t<float> x, py::array_t<float> h, Doubles mean,
           Doubles scale, const Doubles &offset, const Doubles &output_scale)
      : core_(core),
        owner_(owner),
        trunk_(reinterpret_cast<TrunkFunction>(trunk)),
        x_(std::move(x)),
        h_(std::move(h)),
        mean_(std::move(mean)),
        scale_(std::move(scale)),
        rows_(h_.shape(0)),
        count_(rows_ * core.outputs()),
        u_(static_cast<std::size_t>(count_)),
        var_(u_.size()),
        cov_(u_.size() * u_.size()) {
    for (const double s : output_scale) log_scale_ += static_cast<double>(rows_) * std::log(s);
    for (std::size_t i = 0; i < u_.size(); ++i) {
      offset_.push_back(offset[i % offset.size()]);
      output_scale_.push_back(output_scale[i % output_scale.size()]);
    }
  }

  // None: x is not a plain array, or there is no C function.
  py::object predict(const py::object &x) {
    core_.head();  // refuses while another thread is in it: its trunk's buffers are in use as well
    if (trunk_ == nullptr || !is_array(x)) return py::none();
    const auto array = py::reinterpret_borrow<py::array>(x);
    if (!(array.flags() & py::array::c_style) || !same_shape(array)) return py::none();
    if (array.dtype().is(double_)) {
      normalise(static_cast<const double *>(array.data()));
    } else if (array.dtype().is(float_)) {
      normalise(static_cast<const float *>(array.data()));
    } else {
      return py::none();
    }
    const int refused = run_trunk();
    return refused == 0 ? predict_rows() : py::int_(refused == 1 ? kTrunkInput : kTrunkOutput);
  }

  // The rows that the trunk has left in h.
  py::object predict_rows() {
    core_.head();
    const py::ssize_t rows = rows_ == 1 ? -1 : rows_;
    py::array mean = new_array(double_, rows, core_.outputs()), cov = new_array(double_, count_, count_);
    py::array total_var = new_array(double_, rows, core_.outputs());
    auto *m = static_cast<double *>(mean.mutable_data()), *c = static_cast<double *>(cov.mutable_data());
    auto *t = static_cast<double *>(total_var.mutable_data());
    const kbt_status status = core_.work([&] { return predict_into(m, c, t); });
    if (status != KBT_OK) return py::int_(static_cast<int>(status));
    return record(results().prediction, std::move(mean), std::move(cov), std::move(total_var));
  }

  // The same without Python: m, t of `count` numbers, c of count * count. In double, as the square of a scale need not
  // fit into a float.
  kbt_status predict_into(double *m, double *c, double *t) {
    const kbt_status status =
        kbt_predict(core_.unguarded(), h_.data(), static_cast<int32_t>(rows_), u_.data(), cov_.data(), var_.data());
    if (status != KBT_OK) return status;
    core_.predicted(rows_ == 1, owner_);
    const std::size_t n = u_.size();
    for (std::size_t i = 0; i < n; ++i) {
      const double s = output_scale_[i];
      m[i] = offset_[i] + s * static_cast<double>(u_[i]);
      t[i] = s * s * static_cast<double>(var_[i]);
      for (std::size_t k = 0; k < n; ++k) {
        c[i * n + k] = s * output_scale_[k] * static_cast<double>(cov_[i * n + k]);
      }
    }
    return KBT_OK;
  }

  // None: y is neither a number for a single output nor a plain array.
  py::object observe(const py::object &y) {
    if (const int refused = core_.cannot_observe(owner_)) return py::int_(refused);
    double one = 0.0;
    const double *target = nullptr;
    if (PyFloat_Check(y.ptr()) && count_ == 1) {
      one = PyFloat_AS_DOUBLE(y.ptr());
      target = &one;
    } else if (is_array(y) && py::reinterpret_borrow<py::array>(y).dtype().is(double_)) {
      const auto array = py::reinterpret_borrow<py::array>(y);
      const bool one_row = rows_ == 1 && array.ndim() == 1 && array.shape(0) == count_;
      const bool several = rows_ > 1 && array.ndim() == 2 && array.shape(0) == rows_ && array.size() == count_;
      if (!(array.flags() & py::array::c_style) || !(one_row || several)) return py::none();
      target = static_cast<const double *>(array.data());
    } else {
      return py::none();
    }
    kbt_result result{0.0, 0.0};
    const kbt_status status = core_.work([&] { return observe_target(target, &result); });
    if (status != KBT_OK && status != KBT_GATED) return py::int_(static_cast<int>(status));
    core_.post();
    return update_record(status == KBT_GATED, result.nis, result.log_likelihood - log_scale_);
  }

  // The same without Python. What float32 cannot hold becomes infinite, and is refused by the core.
  kbt_status observe_target(const double *target, kbt_result *result) {
    for (std::size_t i = 0; i < u_.size(); ++i) {
      u_[i] = static_cast<float>((target[i] - offset_[i]) / output_scale_[i]);
    }
    return kbt_observe(core_.unguarded(), u_.data(), nullptr, 0, result);
  }

  // Scaling and trunk without Python: 0, or what the trunk returned. x: as many numbers as its input has.
  int run_trunk(const double *x) {
    normalise(x);
    return run_trunk();
  }

  bool has_trunk() const { return trunk_ != nullptr; }
  py::ssize_t input_size() const { return x_.size(); }
  py::ssize_t count() const { return count_; }

 private:
  int run_trunk() {
    const void *const inputs[] = {x_.data()};
    return trunk_(inputs, h_.mutable_data());
  }

  // As the trunk's input, leading axes of length 1 left out or not.
  bool same_shape(const py::array &array) const {
    if (array.size() != x_.size() || array.ndim() > x_.ndim() || array.ndim() < 1) return false;
    for (py::ssize_t i = 1; i <= array.ndim(); ++i) {
      if (array.shape(array.ndim() - i) != x_.shape(x_.ndim() - i)) return false;
    }
    return true;
  }

  template <class T>
  void normalise(const T *x) {
    float *to = x_.mutable_data();
    const auto features = static_cast<py::ssize_t>(mean_.size());
    for (py::ssize_t i = 0; i < x_.size(); ++i) {
      const auto f = static_cast<std::size_t>(i % features);
      to[i] = static_cast<float>((static_cast<double>(x[i]) - mean_[f]) / scale_[f]);
    }
  }

  Core &core_;
  long owner_;
  TrunkFunction trunk_;
  py::array_t<float> x_, h_;
  Doubles mean_, scale_;
  py::ssize_t rows_, count_;
  Doubles offset_, output_scale_;  // one for each of the `count` outputs
  std::vector<float> u_, var_, cov_;
  double log_scale_ = 0.0;
  py::dtype double_ = py::dtype::of<double>(), float_ = py::dtype::of<float>();
};

#if !defined(__clang__)
#pragma GCC pop_options
#endif

namespace bench = kbt::bench;

// Samples for the loops of bench_loop.hpp, and what they run without Python: a model, a head alone, or nothing.
class Loop {
 public:
  Loop(const Loop &) = delete;  // step_ points here
  // x: (samples, …) doubles in physical units, as many a sample as the trunk's input has; y: (samples, rows * outputs).
  Loop(Pipeline &pipeline, py::array_t<double, py::array::c_style> x, py::array_t<double, py::array::c_style> y)
      : pipeline_(&pipeline), step_{this, pipeline_trunk, pipeline_predict, pipeline_observe} {
    if (!pipeline.has_trunk()) throw py::value_error("pipeline: expected one with a compiled trunk");
    take(std::move(x), pipeline.input_size(), std::move(y), pipeline.count());
    make_room(pipeline.count());
  }
  // x: (samples, rows * d) and y: (samples, rows * outputs) in the head's dtype, or y: (samples, rows) int32 labels.
  Loop(Core &core, int rows, py::array x, py::array y)
      : core_(&core), rows_(rows), step_{this, nullptr, core_predict, core_observe} {
    const kbt_config &cfg = core.config();
    const py::dtype dtype = cfg.dtype == KBT_FLOAT64 ? py::dtype::of<double>() : py::dtype::of<float>();
    labels_ = y.dtype().is(py::dtype::of<int32_t>());
    if (!x.dtype().is(dtype) || !(labels_ || y.dtype().is(dtype))) throw py::value_error("x, y: another dtype");
    if (rows < 1 || rows > cfg.max_rows) throw py::value_error("rows: expected 1..max_rows");
    take(std::move(x), rows * cfg.widths[0], std::move(y), labels_ ? rows : rows * core.outputs());
    make_room(rows * core.outputs());
  }
  // The harness itself: every stage returns at once.
  Loop() : step_{this, nothing, nothing, nothing} { take(py::array_t<double>(1), 1, py::array_t<double>(1), 1); }

  int stages(std::size_t first, std::size_t steps, std::size_t trunk, std::size_t head, bench::Recorder &to) const {
    return bench::run_stages(step_, samples_, first, steps, {trunk, head}, to);
  }
  int steps(std::size_t first, std::size_t batches, std::size_t batch, bench::Recorder &to) const {
    return bench::run_steps(step_, samples_, first, batches, batch, to);
  }
  // twin: null, or a loop of the same kind that rehearses.
  int paced(std::size_t first, std::size_t steps, bench::Recorder &to, const Loop *twin) const {
    return bench::run_paced(step_, twin != nullptr ? &twin->step_ : nullptr, samples_, first, steps, to);
  }

 private:
  void take(py::array x, py::ssize_t x_size, py::array y, py::ssize_t y_size) {
    const bool plain = (x.flags() & y.flags() & py::array::c_style) != 0 && x.ndim() > 0 && y.ndim() > 0;
    if (!plain || x.shape(0) < 1 || x.shape(0) != y.shape(0) || x.size() != x.shape(0) * x_size ||
        y.size() != y.shape(0) * y_size) {
      throw py::value_error("x, y: expected C-contiguous arrays with as many samples, of the sizes of one step");
    }
    x_ = std::move(x);
    y_ = std::move(y);
    samples_ = {static_cast<const unsigned char *>(x_.data()), static_cast<const unsigned char *>(y_.data()),
                static_cast<std::size_t>(x_size * x_.itemsize()), static_cast<std::size_t>(y_size * y_.itemsize()),
                static_cast<std::size_t>(x_.shape(0))};
  }
  void make_room(py::ssize_t count) {  // doubles, which floats may use as well
    mean_.resize(static_cast<std::size_t>(count));
    total_var_.resize(static_cast<std::size_t>(count));
    cov_.resize(static_cast<std::size_t>(count * count));
  }
  static int learned(kbt_status status) { return status == KBT_GATED ? KBT_OK : status; }

  static int nothing(void *, const void *) { return 0; }
  static int pipeline_trunk(void *self, const void *x) {
    return static_cast<Loop *>(self)->pipeline_->run_trunk(static_cast<const double *>(x));
  }
  static int pipeline_predict(void *self, const void *) {
    auto *loop = static_cast<Loop *>(self);
    return loop->pipeline_->predict_into(loop->mean_.data(), loop->cov_.data(), loop->total_var_.data());
  }
  static int pipeline_observe(void *self, const void *y) {
    kbt_result result{0.0, 0.0};
    return learned(static_cast<Loop *>(self)->pipeline_->observe_target(static_cast<const double *>(y), &result));
  }
  static int core_predict(void *self, const void *h) {
    auto *loop = static_cast<Loop *>(self);
    return kbt_predict(loop->core_->unguarded(), h, loop->rows_, loop->mean_.data(), loop->cov_.data(),
                       loop->total_var_.data());
  }
  static int core_observe(void *self, const void *y) {
    const auto *loop = static_cast<Loop *>(self);
    kbt_result result{0.0, 0.0};
    return learned(loop->labels_ ? kbt_observe_labels(loop->core_->unguarded(), static_cast<const int32_t *>(y),
                                                      nullptr, 0, &result)
                                 : kbt_observe(loop->core_->unguarded(), y, nullptr, 0, &result));
  }

  Pipeline *pipeline_ = nullptr;
  Core *core_ = nullptr;
  int32_t rows_ = 0;
  bool labels_ = false;
  py::array x_, y_;
  std::vector<double> mean_, total_var_, cov_;
  bench::Samples samples_{};
  bench::Step step_;
};

// mark, wait and early as plain C functions: a Python loop calls them, and pybind's own dispatch would cost more than
// the clock.
template <auto action>
PyObject *act(PyObject *capsule, PyObject *) {
  auto &recorder = *static_cast<bench::Recorder *>(PyCapsule_GetPointer(capsule, nullptr));
  if constexpr (std::is_void_v<decltype((recorder.*action)())>) {
    (recorder.*action)();
    Py_RETURN_NONE;
  } else {
    return PyBool_FromLong((recorder.*action)());
  }
}
template <auto action>
py::object c_function(bench::Recorder &recorder) {
  static PyMethodDef definition = {"action", act<action>, METH_NOARGS, nullptr};
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, py::capsule(&recorder).ptr()));
}

template <std::size_t N, class T>
std::vector<T> to_vector(const T (&values)[N], int used) {
  return std::vector<T>(values, values + used);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The compiled core of kbt_edge.";
  m.attr("ABI_VERSION") = kbt_abi_version();
  m.attr("MAX_LAYERS") = KBT_MAX_LAYERS;
  m.attr("TRUNK_INPUT") = kTrunkInput;
  m.attr("TRUNK_OUTPUT") = kTrunkOutput;
  m.attr("OTHER_OWNER") = kOtherOwner;
  // By dtype: the part of an arena that depends on the machine, as it holds pointers. The rest is numbers.
  m.attr("RECORD_BYTES") = py::make_tuple(sizeof(kbt::Head<float>), sizeof(kbt::Head<double>));
  m.def("status_str", [](int status) { return kbt_status_str(static_cast<kbt_status>(status)); });
  m.def("state_config", [](const py::bytes &blob) -> py::object {
    const std::string_view view = blob;
    kbt_config cfg{};
    const kbt_status status = kbt_state_config(view.data(), view.size(), &cfg);
    if (status != KBT_OK) return py::int_(static_cast<int>(status));
    return py::cast(cfg);
  });

  m.def("flight_info", [](const py::bytes &log) -> py::object {
    const std::string_view view = log;
    kbt_flight_info info{};
    const kbt_status status = kbt_flight_check(view.data(), view.size(), &info);
    if (status != KBT_OK) return py::int_(static_cast<int>(status));
    return py::make_tuple(info.records, info.before, info.checkpoint, info.final_hash, info.base_offset,
                          info.base_bytes, info.records_offset, info.record_bytes, py::cast(info.cfg));
  });

  py::class_<kbt_config>(m, "Config")
      .def(py::init([](int d, int outputs) {
        kbt_config cfg;
        kbt_config_default(&cfg, d, outputs);
        return cfg;
      }))
      .def_readwrite("dtype", &kbt_config::dtype)
      .def_readonly("layers", &kbt_config::layers)
      .def_property(
          "widths", [](const kbt_config &c) { return to_vector(c.widths, c.layers + 1); },
          [](kbt_config &c, const std::vector<int32_t> &w) {
            if (w.size() < 2 || w.size() > KBT_MAX_LAYERS + 1) throw py::value_error("widths: 2..9 entries");
            c.layers = static_cast<int32_t>(w.size()) - 1;
            std::copy(w.begin(), w.end(), c.widths);
          })
      .def_property(
          "prior_var", [](const kbt_config &c) { return to_vector(c.prior_var, c.layers); },
          [](kbt_config &c, const std::vector<double> &v) {
            if (static_cast<int32_t>(v.size()) != c.layers) throw py::value_error("prior_var: one per layer");
            std::copy(v.begin(), v.end(), c.prior_var);
          })
      .def_readwrite("max_rows", &kbt_config::max_rows)
      .def_readwrite("output", &kbt_config::output)
      .def_readwrite("covariance", &kbt_config::covariance)
      .def_readwrite("rule", &kbt_config::rule)
      .def_readwrite("noise", &kbt_config::noise)
      .def_readwrite("relu_order", &kbt_config::relu_order)
      .def_readwrite("softmax_order", &kbt_config::softmax_order)
      .def_readwrite("noise_var", &kbt_config::noise_var)
      .def_readwrite("input_var", &kbt_config::input_var)
      .def_readwrite("forgetting", &kbt_config::forgetting)
      .def_readwrite("gate", &kbt_config::gate)
      .def("check",
           [](const kbt_config &c) {
             const char *field = "";
             const int status = kbt_config_check(&c, &field);
             return py::make_tuple(status, std::string(field));
           })
      .def("arena_bytes", [](const kbt_config &c) { return kbt_arena_bytes(&c); });

  m.def("set_results", [](const py::type &prediction, const py::type &update, const py::type &error) {
    results().error = py::type(error).release().ptr();
    results().prediction = reinterpret_cast<PyTypeObject *>(py::type(prediction).release().ptr());
    results().update = reinterpret_cast<PyTypeObject *>(py::type(update).release().ptr());
  });
  py::class_<Mailbox, std::shared_ptr<Mailbox>>(m, "Mailbox").def(py::init([](const Core &core) {
    return std::make_shared<Mailbox>(core.head());
  }));
  py::class_<Core> core(m, "Core");
  fast<Core, &Core::predict, 2>(core, "predict");
  fast<Core, &Core::learn, 4>(core, "learn");
  core.def(py::init<const kbt_config &>())
      .def("set_prior", &Core::set_prior)
      .def("set_means", &Core::set_means)
      .def("set_noise", &Core::set_noise)
      .def("noise", &Core::noise)
      .def("mean", &Core::mean)
      .def("cov", &Core::cov)
      .def("factor_range", &Core::factor_range)
      .def("counters", &Core::counters)
      .def("health", &Core::health)
      .def("record_flight", &Core::record_flight)
      .def("stop_flight", &Core::stop_flight)
      .def("flight_log", &Core::flight_log)
      .def("replay", &Core::replay)
      .def("save", &Core::save)
      .def("load", &Core::load)
      .def("post_to", &Core::post_to)
      .def("take", &Core::take)
      .def("new_owner", &Core::new_owner)
      .def_property_readonly("ticket", &Core::ticket)
      .def_property_readonly("samples", &Core::samples)
      .def_property_readonly("predicted_rows", &Core::predicted_rows)
      .def_property_readonly("one_row", &Core::one_row)
      .def_property_readonly("nbytes", &Core::nbytes)
      .def_property_readonly("config", &Core::config);

  py::class_<Pipeline> pipeline(m, "Pipeline");
  fast<Pipeline, &Pipeline::predict, 1>(pipeline, "predict");
  fast<Pipeline, &Pipeline::predict_rows, 0>(pipeline, "predict_rows");
  fast<Pipeline, &Pipeline::observe, 1>(pipeline, "observe");
  pipeline.def(py::init<Core &, long, std::uintptr_t, py::array_t<float>, py::array_t<float>, Pipeline::Doubles,
                        Pipeline::Doubles, Pipeline::Doubles, Pipeline::Doubles>(),
               py::keep_alive<1, 2>());

  m.attr("COMPILER") = KBT_COMPILER;
  m.attr("HAS_COUNTER") = bench::has_counter();
  m.def("clocks", [] { return py::make_tuple(bench::counter(), bench::monotonic_ns()); });
  m.def("set_flush_to_zero", &bench::set_flush_to_zero);
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<bench::Recorder>(m, "Recorder")
      .def(py::init<std::size_t, bool>())
      .def("clear", &bench::Recorder::clear)
      .def("pace", &bench::Recorder::pace)
      .def("watch", &bench::Recorder::watch, unlocked())
      .def_property_readonly("mark", py::cpp_function(&c_function<&bench::Recorder::mark>, py::keep_alive<0, 1>()))
      .def_property_readonly("wait", py::cpp_function(&c_function<&bench::Recorder::wait>, py::keep_alive<0, 1>()))
      .def_property_readonly("early", py::cpp_function(&c_function<&bench::Recorder::early>, py::keep_alive<0, 1>()))
      .def_property_readonly("room", &bench::Recorder::room)
      .def_property_readonly("stamps", [](const bench::Recorder &r) {
        return py::array_t<std::uint64_t>(static_cast<py::ssize_t>(r.used()), r.stamps().data());
      });
  py::class_<Loop>(m, "Loop")
      .def(py::init<>())
      .def(py::init<Pipeline &, py::array_t<double, py::array::c_style>, py::array_t<double, py::array::c_style>>(),
           py::keep_alive<1, 2>())
      .def(py::init<Core &, int, py::array, py::array>(), py::keep_alive<1, 2>())
      .def("stages", &Loop::stages, unlocked())
      .def("steps", &Loop::steps, unlocked())
      .def("paced", &Loop::paced, unlocked());
}
