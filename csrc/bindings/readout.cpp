// readout.cpp - kbt_readout.h in Python. Arrays are checked by kbt_edge/readout.py.
#include <string>

#include "head.hpp"
#include "kbt_readout.h"

namespace kbt::python {

namespace {

class Readout {
 public:
  Readout(py::array weight, py::object bias, int top, int held, double prior_var)
      : weight_(std::move(weight)), bias_(std::move(bias)) {
    const kbt_readout_config cfg{static_cast<int32_t>(weight_.shape(1)), static_cast<int32_t>(weight_.shape(0)), top,
                                 held, prior_var};
    const char *const wrong = kbt_readout_check(&cfg);
    if (wrong != nullptr) throw py::value_error(wrong);
    classes_ = cfg.classes;
    bytes_ = kbt_readout_bytes(&cfg);
    memory_ = Memory(::operator new (bytes_, std::align_val_t{KBT_ARENA_ALIGN}));
    const auto *b = bias_.is_none() ? nullptr : static_cast<const float *>(py::array(bias_).data());
    const kbt_status status =
        kbt_readout_init(&cfg, static_cast<const float *>(weight_.data()), b, memory_.get(), bytes_, &readout_);
    if (status != KBT_OK) throw py::value_error(kbt_status_str(status));
  }
  // (p, var), or a status
  py::object predict(const py::array &h) {
    py::array p(py::dtype::of<float>(), std::vector<py::ssize_t>{classes_});
    float var = 0.0F;
    const kbt_status status = kbt_readout_predict(readout_, static_cast<const float *>(h.data()),
                                                  static_cast<float *>(p.mutable_data()), &var);
    return status == KBT_OK ? py::object(py::make_tuple(p, var)) : py::object(py::int_(static_cast<int>(status)));
  }
  // (log likelihood, left out, dropped), or a status. h is None to learn the latest prediction.
  py::object learn(const py::object &h, int label) {
    kbt_readout_result result{};
    const kbt_status status =
        h.is_none() ? kbt_readout_observe(readout_, label, &result)
                    : kbt_readout_update(readout_, static_cast<const float *>(py::array(h).data()), label, &result);
    if (status != KBT_OK) return py::int_(static_cast<int>(status));
    return py::make_tuple(result.log_likelihood, result.left_out, result.dropped);
  }
  py::bytes save() const {
    std::string blob;
    blob.reserve(kbt_readout_state_size(readout_));
    kbt_readout_state_write(
        readout_,
        [](void *to, const void *bytes, std::size_t count) {
          static_cast<std::string *>(to)->append(static_cast<const char *>(bytes), count);
        },
        &blob);
    return py::bytes(blob);
  }
  int load(const std::string &blob) { return kbt_readout_state_load(readout_, blob.data(), blob.size()); }
  void reset() { kbt_readout_reset(readout_); }
  std::uint64_t samples() const { return kbt_readout_samples(readout_); }
  std::uint64_t dropped() const { return kbt_readout_dropped(readout_); }
  int held() const { return kbt_readout_held(readout_); }
  std::size_t nbytes() const { return bytes_; }

 private:
  py::array weight_;  // kept alive: the readout is read where it is
  py::object bias_;
  Memory memory_;
  kbt_readout *readout_ = nullptr;
  py::ssize_t classes_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace

void bind_readout(py::module_ &m) {
  py::class_<Readout>(m, "Readout")
      .def(py::init<py::array, py::object, int, int, double>())
      .def("predict", &Readout::predict)
      .def("learn", &Readout::learn)
      .def("save", &Readout::save)
      .def("load", &Readout::load)
      .def("reset", &Readout::reset)
      .def_property_readonly("samples", &Readout::samples)
      .def_property_readonly("dropped", &Readout::dropped)
      .def_property_readonly("held", &Readout::held)
      .def_property_readonly("nbytes", &Readout::nbytes);
}

}  // namespace kbt::python
