// References to Python objects, and calls of them.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <utility>

namespace epigemm::python {

// An owned reference; null after an error.
class Object {
 public:
  Object() = default;
  explicit Object(PyObject* owned) : object_(owned) {}
  Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object& operator=(Object&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object() { Py_XDECREF(object_); }

  static Object borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Object(object);
  }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

template <class... Arguments>
Object call(PyObject* function, Arguments... arguments) {
  return Object(PyObject_CallFunctionObjArgs(function, arguments..., nullptr));
}

template <class... Arguments>
Object call_method(PyObject* object, PyObject* name, Arguments... arguments) {
  return Object(PyObject_CallMethodObjArgs(object, name, arguments..., nullptr));
}

}  // namespace epigemm::python
