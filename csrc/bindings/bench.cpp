#include <vector>

#include "bench_loop.hpp"
#include "policy.hpp"

namespace kbt::python {

namespace {

// Samples for the loops of bench_loop.hpp, and what they run without Python: a model, a head alone, or nothing.
class Loop {
 public:
  Loop(const Loop &) = delete;  // step_ points here
  // x: (samples, input size) doubles in physical units; y: (samples, rows * outputs).
  Loop(Policy &policy, py::array_t<double, py::array::c_style> x, py::array_t<double, py::array::c_style> y)
      : policy_(&policy), step_{this, policy_trunk, policy_predict, policy_observe} {
    if (!policy.runs_alone()) throw py::value_error("policy: expected one with a compiled trunk of one real input");
    take(std::move(x), policy.input_size(), std::move(y), policy.count());
    make_room(policy.count());
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
  int paced(std::size_t first, std::size_t steps, bench::Recorder &to) const {
    return bench::run_paced(step_, samples_, first, steps, to);
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
  }
  static int learned(kbt_status status) { return status == KBT_GATED ? KBT_OK : status; }

  static int nothing(void *, const void *) { return 0; }
  static int policy_trunk(void *self, const void *x) {
    const void *const inputs[] = {x};
    return kbt_policy_features(static_cast<Loop *>(self)->policy_->get(), inputs);
  }
  static int policy_predict(void *self, const void *) {
    auto *loop = static_cast<Loop *>(self);
    return kbt_policy_predict_rows(loop->policy_->get(), loop->mean_.data(), nullptr, loop->total_var_.data());
  }
  static int policy_observe(void *self, const void *y) {
    kbt_result result{};
    return learned(kbt_policy_observe(static_cast<Loop *>(self)->policy_->get(), static_cast<const double *>(y),
                                      nullptr, 0, &result));
  }
  static int core_predict(void *self, const void *h) {
    auto *loop = static_cast<Loop *>(self);
    return kbt_predict(loop->core_->unguarded(), h, loop->rows_, loop->mean_.data(), nullptr, loop->total_var_.data());
  }
  static int core_observe(void *self, const void *y) {
    const auto *loop = static_cast<Loop *>(self);
    kbt_result result{};
    return learned(loop->labels_ ? kbt_observe_labels(loop->core_->unguarded(), static_cast<const int32_t *>(y),
                                                      nullptr, 0, &result)
                                 : kbt_observe(loop->core_->unguarded(), y, nullptr, 0, &result));
  }

  Policy *policy_ = nullptr;
  Core *core_ = nullptr;
  int32_t rows_ = 0;
  bool labels_ = false;
  py::array x_, y_;
  std::vector<double> mean_, total_var_;
  bench::Samples samples_{};
  bench::Step step_;
};

// mark and wait as plain C functions for a Python loop: pybind11's dispatch would cost more than the clock.
template <auto action>
PyObject *act(PyObject *capsule, PyObject *) {
  auto &recorder = *static_cast<bench::Recorder *>(PyCapsule_GetPointer(capsule, nullptr));
  (recorder.*action)();
  Py_RETURN_NONE;
}
template <auto action>
py::object c_function(bench::Recorder &recorder) {
  static PyMethodDef definition = {"action", act<action>, METH_NOARGS, nullptr};
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, py::capsule(&recorder).ptr()));
}

}  // namespace

void bind_bench(py::module_ &m) {
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
      .def_property_readonly("room", &bench::Recorder::room)
      .def_property_readonly("stamps", [](const bench::Recorder &r) {
        return py::array_t<std::uint64_t>(static_cast<py::ssize_t>(r.used()), r.stamps().data());
      });
  py::class_<Loop>(m, "Loop")
      .def(py::init<>())
      .def(py::init<Policy &, py::array_t<double, py::array::c_style>, py::array_t<double, py::array::c_style>>(),
           py::keep_alive<1, 2>())
      .def(py::init<Core &, int, py::array, py::array>(), py::keep_alive<1, 2>())
      .def("stages", &Loop::stages, unlocked())
      .def("steps", &Loop::steps, unlocked())
      .def("paced", &Loop::paced, unlocked());
}

}  // namespace kbt::python
