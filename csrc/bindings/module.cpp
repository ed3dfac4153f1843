// module.cpp - pybind11 bindings of the public C ABI.
#include <string>

#include "fastcall.hpp"
#include "kbt_flight.h"

#if defined(__clang__)
#define KBT_COMPILER "clang " __clang_version__
#else
#define KBT_COMPILER "gcc " __VERSION__
#endif

namespace py = pybind11;

namespace {

// The names of C's statuses and choices, so that Python need not know their numbers.
void export_constants(py::module_ &m) {
  const std::pair<const char *, kbt_status> statuses[] = {
      {"OK", KBT_OK},
      {"GATED", KBT_GATED},
      {"E_NULL", KBT_E_NULL},
      {"E_CONFIG", KBT_E_CONFIG},
      {"E_SIZE", KBT_E_SIZE},
      {"E_ALIGN", KBT_E_ALIGN},
      {"E_ROWS", KBT_E_ROWS},
      {"E_NONFINITE", KBT_E_NONFINITE},
      {"E_RANGE", KBT_E_RANGE},
      {"E_NOISE", KBT_E_NOISE},
      {"E_LABEL", KBT_E_LABEL},
      {"E_ORDER", KBT_E_ORDER},
      {"E_LAYER", KBT_E_LAYER},
      {"E_BLOB_SHORT", KBT_E_BLOB_SHORT},
      {"E_BLOB_FOREIGN", KBT_E_BLOB_FOREIGN},
      {"E_BLOB_VERSION", KBT_E_BLOB_VERSION},
      {"E_BLOB_CRC", KBT_E_BLOB_CRC},
      {"E_BLOB_CONFIG", KBT_E_BLOB_CONFIG},
      {"E_BLOB_VALUE", KBT_E_BLOB_VALUE},
      {"E_TRUNK_INPUT", KBT_E_TRUNK_INPUT},
      {"E_TRUNK_OUTPUT", KBT_E_TRUNK_OUTPUT},
      {"E_OWNER", KBT_E_OWNER},
  };
  for (const auto &[name, status] : statuses) m.attr(name) = static_cast<int>(status);

  static_assert(KBT_FLOAT64 == 1 && KBT_SOFTMAX == 1 && KBT_SHARED == 3 && KBT_REPLACE == 1 && KBT_NOISE_MATRIX == 4 &&
                    KBT_AS_BEFORE == 7 && KBT_RETURNED == 2 && KBT_NOISIER == 8 && KBT_FLIGHT_SET_NOISE == 4,
                "the tuples below are in the order of the enums");
  m.attr("DTYPES") = py::make_tuple("float32", "float64");
  m.attr("COVARIANCE_AUTO") = static_cast<int>(KBT_COVARIANCE_AUTO);
  m.attr("OUTPUTS") = py::make_tuple("gaussian", "softmax");
  m.attr("COVARIANCES") = py::make_tuple("full", "neuron", "diagonal", "shared");
  m.attr("RULES") = py::make_tuple("fuse", "replace");
  m.attr("NOISES") = py::make_tuple("constant", "adaptive", "multinomial", "full", "matrix");
  m.attr("MEMBERS") = py::make_tuple("still", "noisy", "drifts slowly", "drifts", "drifts fast", "offset drifts",
                                     "has changed", "as before");
  m.attr("CHANGES") = py::make_tuple("none", "changed", "returned");
  m.attr("FLIGHT_KINDS") = py::make_tuple("update", "update_labels", "observe", "observe_labels", "set_noise");
  m.attr("VERDICTS") = py::make_tuple("too few samples", "consistent", "overconfident", "underconfident", "diverging",
                                      "no band", "changed", "drifting", "noisy");
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The compiled core of kbt_edge.";
  if (kbt_abi_version() != KBT_ABI_VERSION) {
    throw py::import_error("another libkbt.so is loaded in this process, of ABI version " +
                           std::to_string(kbt_abi_version()) + "; kbt_edge needs its own, of version " +
                           std::to_string(KBT_ABI_VERSION) + ": import kbt_edge before loading the other one");
  }
  m.attr("ABI_VERSION") = KBT_ABI_VERSION;
  m.attr("MAX_LAYERS") = KBT_MAX_LAYERS;
  m.attr("COMPILER") = KBT_COMPILER;
  // By dtype: the part of an arena that depends on the machine, as it holds pointers. The rest is numbers.
  m.attr("RECORD_BYTES") = py::make_tuple(kbt_record_bytes(KBT_FLOAT32), kbt_record_bytes(KBT_FLOAT64));
  export_constants(m);
  m.def("status_str", [](int status) { return kbt_status_str(static_cast<kbt_status>(status)); });
  m.def("set_results", [](const py::type &prediction, const py::type &update, const py::type &error) {
    auto &types = kbt::python::results();
    types.error = py::type(error).release().ptr();
    types.prediction = reinterpret_cast<PyTypeObject *>(py::type(prediction).release().ptr());
    types.update = reinterpret_cast<PyTypeObject *>(py::type(update).release().ptr());
  });
  kbt::python::bind_head(m);
  kbt::python::bind_policy(m);
  kbt::python::bind_readout(m);
  kbt::python::bind_bench(m);
}
