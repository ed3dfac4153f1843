// verbs.cpp - predict, update and observe of a head and of a policy, which a control loop calls.
#include "policy.hpp"

namespace kbt::python {

namespace {

// The data of a C-contiguous array of this dtype, else null.
const void *plain_data(const py::object &object, const py::dtype &dtype) {
  if (!is_array(object)) return nullptr;
  const auto array = py::reinterpret_borrow<py::array>(object);
  constexpr int kPlain = py::array::c_style | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
  return (array.flags() & kPlain) == kPlain && array.dtype().is(dtype) ? array.data() : nullptr;
}

py::object rejection(kbt_status status) {
  return py::int_(static_cast<int>(status));
}

}  // namespace

// ---- a head
// ------------------------------------------------------------------------------------------------------------

// Pointer to the data of a plain array with one of the given shapes, else null.
const void *Core::plain(const py::handle &object, py::ssize_t columns, py::ssize_t *rows) const {
  if (!is_array(object)) return nullptr;
  const auto array = py::reinterpret_borrow<py::array>(object);
  constexpr int kPlain = py::array::c_style | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
  if ((array.flags() & kPlain) != kPlain || !array.dtype().is(dtype_)) return nullptr;
  const int ndim = static_cast<int>(array.ndim());
  if (ndim < 1 || ndim > 2 || array.shape(ndim - 1) != columns) return nullptr;
  *rows = ndim == 2 ? array.shape(0) : -1;  // -1: a single row without its own axis
  return array.data();
}

kbt_head *Core::head() const {
  if (!busy_) return head_;
  PyErr_SetString(results().error,
                  "head: expected one thread at a time, got a call while another thread is in one; give each thread "
                  "that predicts its own head.reader()");
  throw py::error_already_set();
}

py::object Core::predict(const py::object &h) {
  py::ssize_t rows = 0;
  const void *input = plain(h, d_, &rows);
  if (input == nullptr) return py::none();
  const py::ssize_t count = rows < 0 ? 1 : rows;
  if (count < 1 || count > cfg_.max_rows) return py::int_(static_cast<int>(KBT_E_ROWS));
  py::array mean = new_array(dtype_, rows, outputs_), var = new_array(dtype_, rows, outputs_);
  py::array total_var = new_array(dtype_, rows, outputs_);
  void *const to[] = {mean.mutable_data(), var.mutable_data(), total_var.mutable_data()};
  const kbt_status status = work([&] {
    const kbt_status found = kbt_predict(head_, input, static_cast<int32_t>(count), to[0], nullptr, to[2]);
    return found == KBT_OK ? kbt_predicted(head_, to[1], nullptr) : found;
  });
  if (status != KBT_OK) return py::int_(static_cast<int>(status));
  one_row_ = rows < 0;
  latest_ = nullptr;
  return record(results().prediction, std::move(mean), std::move(var), std::move(total_var));
}

py::object Core::learn(const py::object &h, const py::object &y, const py::object &noise) {
  py::ssize_t rows = one_row_ ? -1 : kbt_predicted_rows(head()), noise_rows = 0, noise_count = 0;
  const void *input = nullptr;
  if (!h.is_none()) {
    input = plain(h, d_, &rows);
    if (input == nullptr) return py::none();
    if (rows == 0 || rows > cfg_.max_rows) return py::int_(static_cast<int>(KBT_E_ROWS));
  } else if (kbt_predicted_rows(head()) == 0) {
    return py::int_(static_cast<int>(KBT_E_ORDER));
  } else if (latest_ != nullptr) {
    return py::int_(static_cast<int>(KBT_E_OWNER));
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
  kbt_result result{};
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
  return update_record(status == KBT_GATED, result);
}

// ---- a policy
// ----------------------------------------------------------------------------------------------------------

py::object Policy::predict(const py::object &x) {
  core_.head();  // rejects a call while another thread is in one: the trunk's buffers are in use as well
  if (!runs_alone() || !is_array(x)) return py::none();
  const void *data = plain_data(x, double_);
  if (data == nullptr) {
    const auto *floats = static_cast<const float *>(plain_data(x, float_));
    if (floats == nullptr) return py::none();
    given_.assign(floats, floats + py::reinterpret_borrow<py::array>(x).size());
    data = given_.data();
  }
  if (!fits_input(py::reinterpret_borrow<py::array>(x))) return py::none();
  const kbt_status status = kbt_policy_features(&policy_, &data);
  return status == KBT_OK ? predict_rows() : rejection(status);
}

py::object Policy::predict_rows() {
  core_.head();
  py::array mean = new_array(double_, lead(), core_.outputs()), var = new_array(double_, lead(), core_.outputs());
  py::array total_var = new_array(double_, lead(), core_.outputs());
  auto *m = static_cast<double *>(mean.mutable_data()), *v = static_cast<double *>(var.mutable_data());
  auto *t = static_cast<double *>(total_var.mutable_data());
  const kbt_status status = core_.work([&] {
    const kbt_status found = kbt_policy_predict_rows(&policy_, m, nullptr, t);
    return found == KBT_OK ? kbt_policy_predicted(&policy_, v, nullptr) : found;
  });
  if (status != KBT_OK) return rejection(status);
  core_.set_one_row(policy_.rows == 1);
  return record(results().prediction, std::move(mean), std::move(var), std::move(total_var));
}

py::object Policy::learn(const py::object &at_rows, const py::object &y, const py::object &noise) {
  core_.head();
  const bool rows = at_rows.is(py::bool_(true));
  if (!rows) {
    if (kbt_predicted_rows(policy_.head) == 0) return rejection(KBT_E_ORDER);
    if (*core_.latest() != &policy_) return rejection(KBT_E_OWNER);
  }
  double one = 0.0;
  const double *real = target(y, &one);
  const int32_t *classes = real == nullptr ? labels(y) : nullptr;
  if (real == nullptr && classes == nullptr) return py::none();
  const double *R = nullptr;
  int32_t nc = 0;
  if (!noise.is_none()) {
    R = static_cast<const double *>(plain_data(noise, double_));
    if (R == nullptr) return py::none();
    nc = static_cast<int32_t>(py::reinterpret_borrow<py::array>(noise).size());
  }
  kbt_result result{};
  const kbt_status status = core_.work([&] {
    if (rows) {
      return real != nullptr ? kbt_policy_update_rows(&policy_, real, R, nc, &result)
                             : kbt_policy_update_rows_labels(&policy_, classes, R, nc, &result);
    }
    return real != nullptr ? kbt_policy_observe(&policy_, real, R, nc, &result)
                           : kbt_policy_observe_labels(&policy_, classes, R, nc, &result);
  });
  if (status != KBT_OK && status != KBT_GATED) return rejection(status);
  core_.post();
  return update_record(status == KBT_GATED, result);
}

// As the trunk's input, leading axes of length 1 left out or not.
bool Policy::fits_input(const py::array &x) const {
  const auto buffer = py::reinterpret_borrow<py::array>(kept_[0].buffer);
  if (x.size() != buffer.size() || x.ndim() > buffer.ndim() || x.ndim() < 1) return false;
  for (py::ssize_t i = 1; i <= x.ndim(); ++i) {
    if (x.shape(x.ndim() - i) != buffer.shape(buffer.ndim() - i)) return false;
  }
  return true;
}

// y in physical units, or null: it is neither a number for a single output nor a plain array of doubles.
const double *Policy::target(const py::object &y, double *one) const {
  if (PyFloat_Check(y.ptr()) && count_ == 1) {
    *one = PyFloat_AS_DOUBLE(y.ptr());
    return one;
  }
  const auto *data = static_cast<const double *>(plain_data(y, double_));
  if (data == nullptr) return nullptr;
  const auto array = py::reinterpret_borrow<py::array>(y);
  const bool one_row = policy_.rows == 1 && array.ndim() == 1 && array.shape(0) == count_;
  const bool several =
      policy_.rows > 1 && array.ndim() == 2 && array.shape(0) == policy_.rows && array.size() == count_;
  return one_row || several ? data : nullptr;
}

const int32_t *Policy::labels(const py::object &y) const {
  const auto *data = static_cast<const int32_t *>(plain_data(y, py::dtype::of<int32_t>()));
  if (data == nullptr || core_.config().output != KBT_SOFTMAX) return nullptr;
  const auto array = py::reinterpret_borrow<py::array>(y);
  const bool shaped = policy_.rows == 1 ? array.ndim() == 0 : array.ndim() == 1 && array.size() == policy_.rows;
  return shaped ? data : nullptr;
}

}  // namespace kbt::python
