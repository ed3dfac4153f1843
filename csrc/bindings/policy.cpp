#include "policy.hpp"

#include <algorithm>
#include <string>

namespace kbt::python {

namespace {

// A compiled trunk has no context of its own.
using TrunkFunction = int (*)(const void *const *inputs, float *h);
int run_compiled(void *context, const void *const *inputs, float *h) {
  return reinterpret_cast<TrunkFunction>(reinterpret_cast<std::uintptr_t>(context))(inputs, h);
}

}  // namespace

Policy::Policy(Core &core, std::uintptr_t trunk, std::vector<Input> inputs, py::array_t<float> h, Doubles offset,
               Doubles scale, double log_scale)
    : core_(core), kept_(std::move(inputs)), h_(std::move(h)), offset_(std::move(offset)), scale_(std::move(scale)) {
  const auto outputs = static_cast<std::size_t>(core.outputs());
  if (h_.ndim() != 2 || h_.shape(1) != core.config().widths[0]) throw py::value_error("h: expected (rows, d)");
  if (offset_.size() != outputs || scale_.size() != outputs) throw py::value_error("offset, scale: one per output");
  for (const Input &input : kept_) {
    kbt_policy_input entry{};
    if (!input.buffer.is_none()) {
      auto buffer = py::cast<py::array_t<float>>(input.buffer);
      if (input.mean.empty() || input.mean.size() != input.scale.size()) throw py::value_error("mean, scale: sizes");
      entry = {static_cast<int32_t>(buffer.size()), static_cast<int32_t>(input.mean.size()), input.mean.data(),
               input.scale.data(), buffer.mutable_data()};
    }
    inputs_.push_back(entry);
  }
  network_inputs_.resize(inputs_.size());
  count_ = h_.shape(0) * core.outputs();
  u_.resize(static_cast<std::size_t>(count_));
  noise_.resize(core.config().noise == KBT_NOISE_MATRIX ? outputs * outputs : outputs);
  if (core.config().dtype == KBT_FLOAT64) wide_h_.resize(static_cast<std::size_t>(h_.size()));
  policy_.head = core.unguarded();
  policy_.rows = static_cast<int32_t>(h_.shape(0));
  policy_.input_count = static_cast<int32_t>(inputs_.size());
  policy_.inputs = inputs_.data();
  policy_.network_inputs = network_inputs_.data();
  policy_.trunk = trunk != 0 ? run_compiled : nullptr;
  policy_.context = reinterpret_cast<void *>(trunk);
  policy_.offset = offset_.data();
  policy_.scale = scale_.data();
  policy_.log_scale = log_scale;
  policy_.h = h_.mutable_data();
  policy_.wide_h = wide_h_.empty() ? nullptr : wide_h_.data();
  policy_.u = u_.data();
  policy_.noise = noise_.data();
  policy_.latest = core.latest();
  const kbt_status status = kbt_policy_init(&policy_);
  if (status != KBT_OK) throw py::value_error(kbt_status_str(status));
}

Policy::~Policy() {
  // A later policy may get the same address. It must not own this one's prediction.
  static const kbt_policy gone{};
  if (*core_.latest() == &policy_) *core_.latest() = &gone;
}

py::object Policy::predicted_cov() {
  core_.head();
  py::array cov = new_array(double_, count_, count_);
  const kbt_status status = kbt_policy_predicted(&policy_, nullptr, static_cast<double *>(cov.mutable_data()));
  return status == KBT_OK ? py::object(std::move(cov)) : py::int_(static_cast<int>(status));
}

void Policy::scale_input(std::size_t i, const PlainDoubles &x) {
  core_.head();
  if (i >= inputs_.size() || x.size() != inputs_[i].count) throw py::value_error("x: another size");
  kbt_policy_scale_input(&inputs_[i], x.data());
}

py::array Policy::to_head_units(const PlainDoubles &y) const {
  if (y.size() != count_) throw py::value_error("y: another size");
  py::array u = new_array(core_.dtype(), lead(), core_.outputs());
  kbt_policy_target(&policy_, y.data(), u.mutable_data());
  return u;
}

py::array Policy::noise() const {
  core_.head();
  const bool matrix = core_.config().noise == KBT_NOISE_MATRIX || core_.config().noise == KBT_NOISE_FULL;
  Doubles all(scale_.size() * (matrix ? scale_.size() : 1));
  int32_t count = 0;
  kbt_policy_get_noise(&policy_, all.data(), &count);
  py::array result = new_array(double_, count > core_.outputs() ? core_.outputs() : -1, core_.outputs());
  std::copy(all.begin(), all.begin() + count, static_cast<double *>(result.mutable_data()));
  return result;
}

void bind_policy(py::module_ &m) {
  py::class_<Policy> policy(m, "Policy");
  fast<Policy, &Policy::predict, 1>(policy, "predict");
  fast<Policy, &Policy::predict_rows, 0>(policy, "predict_rows");
  policy.def("predicted_cov", &Policy::predicted_cov);
  fast<Policy, &Policy::learn, 3>(policy, "learn");
  policy
      .def(py::init([](Core &core, std::uintptr_t trunk,
                       const std::vector<std::tuple<py::object, Policy::Doubles, Policy::Doubles>> &inputs,
                       const py::array_t<float> &h, const Policy::Doubles &offset, const Policy::Doubles &scale,
                       double log_scale) {
             std::vector<Policy::Input> kept;
             for (const auto &[buffer, mean, deviation] : inputs) kept.push_back({buffer, mean, deviation});
             return std::make_unique<Policy>(core, trunk, std::move(kept), h, offset, scale, log_scale);
           }),
           py::keep_alive<1, 2>())
      .def("scale_input", &Policy::scale_input)
      .def("to_head_units", &Policy::to_head_units)
      .def("noise", &Policy::noise)
      .def_property_readonly("runs_alone", &Policy::runs_alone);
  m.def("scale_noise", [](const Policy::PlainDoubles &noise, const Policy::PlainDoubles &scale) {
    const auto outputs = static_cast<int32_t>(scale.size());
    Policy::Doubles to(static_cast<std::size_t>(std::max(scale.size(), noise.size())));
    int32_t count = 0;
    if (kbt_policy_scale_noise(noise.data(), static_cast<int32_t>(noise.size()), scale.data(), outputs, to.data(),
                               &count) != KBT_OK) {
      throw py::value_error(kbt_status_str(KBT_E_NOISE));
    }
    py::array result = new_array(py::dtype::of<double>(), count > outputs ? outputs : -1, outputs);
    std::copy(to.begin(), to.begin() + count, static_cast<double *>(result.mutable_data()));
    return result;
  });
}

}  // namespace kbt::python
