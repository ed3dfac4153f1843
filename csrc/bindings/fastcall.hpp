// fastcall.hpp - calls from Python with little overhead.
//
// The verbs take plain arrays only (right dtype, C-contiguous, aligned). They return
//   None        an argument is not of that form, and nothing has run: the caller converts it and calls again,
//   an int      the kbt_status with which the core rejected the call,
//   a record    the result, of the types that set_results was given.
// So a control loop that passes plain arrays pays for one check, and every message is written in Python. The verbs are
// bound without pybind11's argument parsing (`fast` below), which would take as long as a small head.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <new>
#include <utility>

#include "kbt.h"

namespace kbt::python {

namespace py = pybind11;

// Exactly an array: a masked array, for example, hides entries that the core would read.
inline bool is_array(const py::handle &object) {
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
inline Results &results() {
  static Results found;
  return found;
}

// A tuple of the given type, filled as tuple.__new__ would.
template <class... Items>
py::object record(PyTypeObject *type, Items... items) {
  auto tuple = py::reinterpret_steal<py::object>(type->tp_alloc(type, sizeof...(Items)));
  if (!tuple) throw py::error_already_set();
  Py_ssize_t i = 0;
  (PyTuple_SET_ITEM(tuple.ptr(), i++, items.release().ptr()), ...);
  return tuple;
}
inline py::object update_record(bool gated, const kbt_result &result) {
  return record(results().update, py::reinterpret_borrow<py::object>(gated ? results().gated : results().ok),
                py::float_(result.nis), py::float_(result.log_likelihood), py::bool_(result.changed != KBT_NO_CHANGE));
}

// A new array of one or two dimensions. rows < 0: a vector.
inline py::array new_array(const py::dtype &dtype, py::ssize_t rows, py::ssize_t columns) {
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

// One function per bound subject, each called once by module.cpp.
void bind_head(py::module_ &m);
void bind_policy(py::module_ &m);
void bind_readout(py::module_ &m);
void bind_bench(py::module_ &m);

}  // namespace kbt::python
