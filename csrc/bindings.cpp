// bindings.cpp - Python's door to the C ABI. Thin: it owns the arena and moves arrays; kbt_edge/head.py explains
// errors.
//
// The verbs take plain arrays only (right dtype, C-contiguous, aligned). They answer
//   None        an argument is not of that form: the caller converts it and calls again,
//   an int      the status with which the core refused,
//   a tuple     the result.
// So a control loop that passes plain arrays pays for one check, and every message is written in Python.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "kbt.h"

namespace py = pybind11;

namespace {

// An array and nothing that only claims to be one: a masked array hides entries that the core would read.
bool is_array(const py::handle &object) {
  const void *type = Py_TYPE(object.ptr()), *array_type = py::detail::npy_api::get().PyArray_Type_;
  return type == array_type;
}
template <class T>
bool is_array_of(const py::handle &object) {
  return is_array(object) && py::isinstance<py::array_t<T>>(object);
}

class Core {
 public:
  explicit Core(const kbt_config &cfg) {
    const std::size_t bytes = kbt_arena_bytes(&cfg);
    if (bytes == 0) throw py::value_error("the configuration is refused; check it with Config.check first");
    arena_.reset(::operator new (bytes, std::align_val_t{KBT_ARENA_ALIGN}));
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

  py::object predict(const py::object &h) {
    py::ssize_t rows = 0;
    const void *input = plain(h, d_, &rows);
    if (input == nullptr) return py::none();
    const py::ssize_t count = rows < 0 ? 1 : rows, K = count * outputs_;
    if (count < 1 || count > cfg_.max_rows) return py::int_(static_cast<int>(KBT_E_ROWS));
    const std::vector<py::ssize_t> shape =
        rows < 0 ? std::vector<py::ssize_t>{outputs_} : std::vector<py::ssize_t>{rows, outputs_};
    py::array mean(dtype_, shape), cov(dtype_, std::vector<py::ssize_t>{K, K}), total_var(dtype_, shape);
    const kbt_status status = kbt_predict(head_, input, static_cast<int32_t>(count), mean.mutable_data(),
                                          cov.mutable_data(), total_var.mutable_data());
    if (status != KBT_OK) return py::int_(static_cast<int>(status));
    one_row_ = rows < 0;
    return py::make_tuple(std::move(mean), std::move(cov), std::move(total_var));
  }

  // y: plain targets, or int32 labels (softmax). h is None to observe the latest prediction.
  py::object learn(const py::object &h, const py::object &y, const py::object &noise) {
    py::ssize_t rows = one_row_ ? -1 : kbt_predicted_rows(head_), noise_rows = 0, noise_count = 0;
    const void *input = nullptr;
    if (!h.is_none()) {
      input = plain(h, d_, &rows);
      if (input == nullptr) return py::none();
      if (rows == 0 || rows > cfg_.max_rows) return py::int_(static_cast<int>(KBT_E_ROWS));
    } else if (kbt_predicted_rows(head_) == 0) {
      return py::int_(static_cast<int>(KBT_E_ORDER));
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
      status = input != nullptr ? kbt_update_labels(head_, input, count, data, R, nc, &result)
                                : kbt_observe_labels(head_, data, R, nc, &result);
    } else {
      py::ssize_t target_rows = 0;
      const void *target = plain(y, outputs_, &target_rows);
      if (target == nullptr || target_rows != rows) return py::none();
      status = input != nullptr ? kbt_update(head_, input, count, target, R, nc, &result)
                                : kbt_observe(head_, target, R, nc, &result);
    }
    if (status != KBT_OK && status != KBT_GATED) return py::int_(static_cast<int>(status));
    return py::make_tuple(status == KBT_GATED, result.nis, result.log_likelihood);
  }

  int set_prior(const py::array &weight, const py::array &bias, std::uint64_t seed) {
    return kbt_set_prior(head_, weight.data(), bias.data(), seed);
  }
  int set_means(const std::vector<py::array> &means) {
    std::array<const void *, KBT_MAX_LAYERS> pointers{};
    for (std::size_t i = 0; i < means.size() && i < pointers.size(); ++i) pointers[i] = means[i].data();
    return kbt_set_means(head_, pointers.data());
  }
  int set_noise(const py::array &noise) {
    return kbt_set_noise(head_, noise.data(), static_cast<int32_t>(noise.size()));
  }

  py::array noise() const {
    py::array all(dtype_, std::vector<py::ssize_t>{outputs_, outputs_});
    int32_t count = 0;
    kbt_get_noise(head_, all.mutable_data(), &count);
    if (count == outputs_ * outputs_ && outputs_ > 1) return all;
    return py::array(dtype_, std::vector<py::ssize_t>{outputs_}, all.data());
  }
  py::array mean(int layer) const {
    const py::ssize_t n = width(layer + 1), m = width(layer) + 1;
    py::array out(dtype_, std::vector<py::ssize_t>{n, m});
    kbt_get_mean(head_, layer, out.mutable_data());
    return out;
  }
  py::array cov(int layer) const {
    const py::ssize_t n = width(layer + 1), m = width(layer) + 1;
    std::vector<py::ssize_t> shape{n, m, m};
    if (cfg_.covariance == KBT_FULL) shape = {n * m, n * m};
    if (cfg_.covariance == KBT_DIAGONAL) shape = {n, m};
    py::array out(dtype_, shape);
    kbt_get_cov(head_, layer, out.mutable_data());
    return out;
  }
  py::tuple factor_range(int layer) const {
    double smallest = 0.0, largest = 0.0;
    kbt_get_factor_range(head_, layer, &smallest, &largest);
    return py::make_tuple(smallest, largest);
  }
  py::tuple counters() const {
    kbt_counters c{};
    kbt_get_counters(head_, &c);
    return py::make_tuple(c.rejected, c.gated, c.floored);
  }

  py::bytes save() const {
    std::vector<char> blob(kbt_state_size(head_));
    kbt_state_save(head_, blob.data(), blob.size());
    return py::bytes(blob.data(), blob.size());
  }
  int load(const py::bytes &blob) {
    const std::string_view view = blob;
    return kbt_state_load(head_, view.data(), view.size());
  }

  kbt_head *head() const { return head_; }
  py::ssize_t outputs() const { return outputs_; }
  void set_one_row(bool one_row) { one_row_ = one_row; }

  std::uint64_t samples() const { return kbt_samples(head_); }
  int predicted_rows() const { return kbt_predicted_rows(head_); }
  bool one_row() const { return one_row_; }
  std::size_t nbytes() const { return bytes_; }
  const kbt_config &config() const { return cfg_; }

 private:
  struct Free {
    void operator()(void *p) const { ::operator delete (p, std::align_val_t{KBT_ARENA_ALIGN}); }
  };
  py::ssize_t width(int i) const { return cfg_.widths[i]; }

  std::unique_ptr<void, Free> arena_;
  std::size_t bytes_ = 0;
  kbt_head *head_ = nullptr;
  kbt_config cfg_{};
  py::dtype dtype_;
  py::ssize_t d_ = 0, outputs_ = 0;
  bool one_row_ = false;  // shape of the latest prediction, for observe
};

// One control step in physical units with a single crossing into C per verb: (x - mean) / scale, the compiled trunk,
// the head, and back. For float32 gaussian heads; a trunk without a C function, or with several inputs, enters at
// predict_rows.
class Pipeline {
 public:
  using TrunkFunction = int (*)(const void *const *inputs, float *output);
  using Doubles = std::vector<double>;

  // x, h: the trunk's own float32 buffers, whose memory the caller keeps alive and in place.
  Pipeline(Core &core, std::uintptr_t trunk, py::array_t<float> x, py::array_t<float> h, Doubles mean, Doubles scale,
           Doubles offset, Doubles output_scale)
      : core_(core),
        trunk_(reinterpret_cast<TrunkFunction>(trunk)),
        x_(std::move(x)),
        h_(std::move(h)),
        mean_(std::move(mean)),
        scale_(std::move(scale)),
        offset_(std::move(offset)),
        output_scale_(std::move(output_scale)),
        rows_(h_.shape(0)),
        count_(rows_ * core.outputs()),
        u_(static_cast<std::size_t>(count_)) {
    for (const double s : output_scale_) log_scale_ += static_cast<double>(rows_) * std::log(s);
  }

  // None: x is not a plain array, or the trunk refused it; the caller goes the long way, which explains.
  py::object predict(const py::object &x) {
    if (trunk_ == nullptr || !is_array(x)) return py::none();
    const auto array = py::reinterpret_borrow<py::array>(x);
    if (!(array.flags() & py::array::c_style) || !same_shape(array)) return py::none();
    if (is_array_of<double>(x)) {
      normalise(static_cast<const double *>(array.data()));
    } else if (is_array_of<float>(x)) {
      normalise(static_cast<const float *>(array.data()));
    } else {
      return py::none();
    }
    const void *const inputs[] = {x_.data()};
    if (trunk_(inputs, h_.mutable_data()) != 0) return py::none();
    return predict_rows();
  }

  // The rows that the trunk has left in h.
  py::object predict_rows() {
    const std::vector<py::ssize_t> shape =
        rows_ == 1 ? std::vector<py::ssize_t>{core_.outputs()} : std::vector<py::ssize_t>{rows_, core_.outputs()};
    py::array_t<double> mean(shape);
    py::array_t<float> cov({count_, count_}), total_var(shape);
    const kbt_status status = kbt_predict(core_.head(), h_.data(), static_cast<int32_t>(rows_), u_.data(),
                                          cov.mutable_data(), total_var.mutable_data());
    if (status != KBT_OK) return py::int_(static_cast<int>(status));
    core_.set_one_row(rows_ == 1);
    double *m = mean.mutable_data();
    float *c = cov.mutable_data(), *t = total_var.mutable_data();
    for (py::ssize_t i = 0; i < count_; ++i) {
      const double s = scale_of(i);
      m[i] = offset_[static_cast<std::size_t>(i % core_.outputs())] +
             s * static_cast<double>(u_[static_cast<std::size_t>(i)]);
      t[i] = static_cast<float>(s * s * static_cast<double>(t[i]));
      for (py::ssize_t k = 0; k < count_; ++k) {
        c[i * count_ + k] = static_cast<float>(s * scale_of(k) * static_cast<double>(c[i * count_ + k]));
      }
    }
    return py::make_tuple(std::move(mean), std::move(cov), std::move(total_var));
  }

  // None: y is neither a number for a single output nor a plain array.
  py::object observe(const py::object &y) {
    double one = 0.0;
    const double *target = nullptr;
    if (PyFloat_Check(y.ptr()) && count_ == 1) {
      one = PyFloat_AS_DOUBLE(y.ptr());
      target = &one;
    } else if (is_array_of<double>(y)) {
      const auto array = py::reinterpret_borrow<py::array>(y);
      const bool one_row = rows_ == 1 && array.ndim() == 1 && array.shape(0) == count_;
      const bool several = rows_ > 1 && array.ndim() == 2 && array.shape(0) == rows_ && array.size() == count_;
      if (!(array.flags() & py::array::c_style) || !(one_row || several)) return py::none();
      target = static_cast<const double *>(array.data());
    } else {
      return py::none();
    }
    if (kbt_predicted_rows(core_.head()) != rows_) return py::none();
    for (py::ssize_t i = 0; i < count_; ++i) {
      const double u = (target[i] - offset_[static_cast<std::size_t>(i % core_.outputs())]) / scale_of(i);
      if (!(std::fabs(u) <= static_cast<double>(std::numeric_limits<float>::max()))) return py::none();
      u_[static_cast<std::size_t>(i)] = static_cast<float>(u);
    }
    kbt_result result{0.0, 0.0};
    const kbt_status status = kbt_observe(core_.head(), u_.data(), nullptr, 0, &result);
    if (status != KBT_OK && status != KBT_GATED) return py::int_(static_cast<int>(status));
    return py::make_tuple(status == KBT_GATED, result.nis, result.log_likelihood - log_scale_);
  }

 private:
  double scale_of(py::ssize_t i) const { return output_scale_[static_cast<std::size_t>(i % core_.outputs())]; }

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
  TrunkFunction trunk_;
  py::array_t<float> x_, h_;
  Doubles mean_, scale_, offset_, output_scale_;
  py::ssize_t rows_, count_;
  std::vector<float> u_;
  double log_scale_ = 0.0;
};

template <std::size_t N, class T>
std::vector<T> to_vector(const T (&values)[N], int used) {
  return std::vector<T>(values, values + used);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The compiled core of kbt_edge.";
  m.attr("ABI_VERSION") = kbt_abi_version();
  m.attr("MAX_LAYERS") = KBT_MAX_LAYERS;
  m.def("status_str", [](int status) { return kbt_status_str(static_cast<kbt_status>(status)); });
  m.def("state_config", [](const py::bytes &blob) -> py::object {
    const std::string_view view = blob;
    kbt_config cfg{};
    const kbt_status status = kbt_state_config(view.data(), view.size(), &cfg);
    if (status != KBT_OK) return py::int_(static_cast<int>(status));
    return py::cast(cfg);
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

  py::class_<Core>(m, "Core")
      .def(py::init<const kbt_config &>())
      .def("predict", &Core::predict)
      .def("learn", &Core::learn)
      .def("set_prior", &Core::set_prior)
      .def("set_means", &Core::set_means)
      .def("set_noise", &Core::set_noise)
      .def("noise", &Core::noise)
      .def("mean", &Core::mean)
      .def("cov", &Core::cov)
      .def("factor_range", &Core::factor_range)
      .def("counters", &Core::counters)
      .def("save", &Core::save)
      .def("load", &Core::load)
      .def_property_readonly("samples", &Core::samples)
      .def_property_readonly("predicted_rows", &Core::predicted_rows)
      .def_property_readonly("one_row", &Core::one_row)
      .def_property_readonly("nbytes", &Core::nbytes)
      .def_property_readonly("config", &Core::config);

  py::class_<Pipeline>(m, "Pipeline")
      .def(py::init<Core &, std::uintptr_t, py::array_t<float>, py::array_t<float>, Pipeline::Doubles,
                    Pipeline::Doubles, Pipeline::Doubles, Pipeline::Doubles>(),
           py::keep_alive<1, 2>())
      .def("predict", &Pipeline::predict)
      .def("predict_rows", &Pipeline::predict_rows)
      .def("observe", &Pipeline::observe);
}
