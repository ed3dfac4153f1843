// policy.hpp - the Policy of Python: a kbt_policy with the buffers that it points to.
#pragma once

#include <cstdint>
#include <vector>

#include "head.hpp"

namespace kbt::python {

class Policy {
 public:
  using Doubles = std::vector<double>;
  using PlainDoubles = py::array_t<double, py::array::c_style>;
  struct Input {
    py::object buffer;  // float32 array, which gets the scaled input; None for ids
    Doubles mean, scale;
  };

  // trunk: address of a compiled trunk's C function; 0: Python runs the network. h: what the trunk writes.
  Policy(Core &core, std::uintptr_t trunk, std::vector<Input> inputs, py::array_t<float> h, Doubles offset,
         Doubles scale, double log_scale);
  Policy(const Policy &) = delete;
  ~Policy();

  // A trunk of one real input with a C function: scaling, trunk, head and scaling in one call. None: another trunk, or
  // x is not a plain array.
  py::object predict(const py::object &x);
  // The rows in h.
  py::object predict_rows();
  py::object predicted_cov();  // of the latest prediction, or the status with which it was rejected
  // At the rows in h, or (at_rows False) at the latest prediction. y: a number for a single output, doubles, or int32
  // labels. noise: None, or 1, d_o or d_o * d_o doubles.
  py::object learn(const py::object &at_rows, const py::object &y, const py::object &noise);

  void scale_input(std::size_t i, const PlainDoubles &x);
  py::array to_head_units(const PlainDoubles &y) const;
  py::array noise() const;

  kbt_policy *get() { return &policy_; }
  bool runs_alone() const { return policy_.trunk != nullptr && inputs_.size() == 1 && inputs_[0].features > 0; }
  py::ssize_t input_size() const { return inputs_[0].count; }
  py::ssize_t count() const { return count_; }

 private:
  bool fits_input(const py::array &x) const;
  const double *target(const py::object &y, double *one) const;
  const int32_t *labels(const py::object &y) const;
  py::ssize_t lead() const { return policy_.rows == 1 ? -1 : policy_.rows; }

  Core &core_;
  std::vector<Input> kept_;
  py::array_t<float> h_;
  Doubles offset_, scale_, wide_h_, noise_, given_;
  std::vector<kbt_policy_input> inputs_;
  std::vector<const void *> network_inputs_;
  std::vector<double> u_;  // floats or doubles
  kbt_policy policy_{};
  py::ssize_t count_ = 0;
  py::dtype double_ = py::dtype::of<double>(), float_ = py::dtype::of<float>();
};

}  // namespace kbt::python
