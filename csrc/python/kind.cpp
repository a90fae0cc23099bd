#include "python/kind.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>

#include "python/state.h"

namespace epigemm::python {
namespace {

bool has(PyObject* tensor, PyObject* name, PyObject* wanted) {
  const Object found(PyObject_GetAttr(tensor, name));
  if (!found) PyErr_Clear();
  return found.get() == wanted;
}

bool is_exchanged(PyObject* tensor) {
  return has(tensor, state.layout, state.strided) && has(tensor, state.is_nested, Py_False) &&
         has(tensor, state.is_meta, Py_False);
}

// What tells calls apart, value by value. A str stands there by its hash, another object by the address of its class:
// two kinds that are taken for one cost time alone.
class Key {
 public:
  Key(Py_ssize_t first, long deep) : first_(first), deep_(deep) { text_.reserve(256); }

  void note_all(PyObject* tuple) { note_items(tuple, PyTuple_Size(tuple), &PyTuple_GetItem, deep_); }

  void note_values(PyObject* dict, Py_ssize_t most, long deep) {
    PyObject* value = nullptr;
    for (Py_ssize_t place = 0, i = 0; i != most && PyDict_Next(dict, &place, nullptr, &value); ++i) {
      note(value, deep);
    }
  }

  PyObject* bytes() const { return PyBytes_FromStringAndSize(text_.data(), static_cast<Py_ssize_t>(text_.size())); }

 private:
  template <class Number>
  void add(Number number) {
    text_.append(reinterpret_cast<const char*>(&number), sizeof number);
  }

  template <class Number>
  void add(char tag, Number number) {
    text_.push_back(tag);
    add(number);
  }

  void note_items(PyObject* items, Py_ssize_t count, PyObject* (*item)(PyObject*, Py_ssize_t), long deep) {
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const value = item(items, i);
      if (!value) return PyErr_Clear();  // a list that has become shorter
      note(value, deep);
    }
  }

  Py_ssize_t looked_at(Py_ssize_t count) const { return first_ < 0 ? count : std::min(count, first_); }

  void note(PyObject* borrowed, long deep) {
    const Object value = Object::borrowed(borrowed);  // a str of a class of its own may run Python
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(borrowed));
    if (type == state.tensor_type || type == state.parameter_type) {
      if (note_tensor(borrowed)) return;
    } else if (borrowed == Py_None || PyBool_Check(borrowed) || type == state.dtype_type) {
      return add('=', borrowed);
    } else if (PyUnicode_Check(borrowed)) {
      const Py_hash_t hash = PyObject_Hash(borrowed);
      if (hash != -1) return add('s', hash);
      PyErr_Clear();
    } else if (first_ < 0 && (PyLong_CheckExact(borrowed) || PyFloat_CheckExact(borrowed))) {
      return note_number(borrowed);
    } else if (deep > 0 && PyTuple_Check(borrowed)) {
      return note_items(borrowed, looked_at(PyTuple_Size(borrowed)), &PyTuple_GetItem, deep - 1);
    } else if (deep > 0 && PyList_Check(borrowed)) {
      return note_items(borrowed, looked_at(PyList_Size(borrowed)), &PyList_GetItem, deep - 1);
    } else if (deep > 0 && PyDict_Check(borrowed)) {
      return note_values(borrowed, first_, deep - 1);
    }
    add('o', type);
    if (first_ < 0 && type == state.tensor_type) note_shape(borrowed);
  }

  // It may be a size: which rows of a tensor are multiplied, or how many.
  void note_number(PyObject* number) {
    int overflow = 0;
    if (PyFloat_CheckExact(number)) return add('f', PyFloat_AsDouble(number));
    const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow) return add('N', PyObject_Hash(number));
    add('n', value);
  }

  // A tensor without strides or memory has sizes all the same; a nested one has none.
  void note_shape(PyObject* tensor) {
    const Object shape(PyObject_GetAttr(tensor, state.shape));
    const Py_hash_t hash = shape ? PyObject_Hash(shape.get()) : -1;
    PyErr_Clear();
    add(hash);
  }

  // False for one that has no strides or no memory. An exchange that fails takes the time of a hundred calls: after the
  // first one, whether it would is asked before.
  bool note_tensor(PyObject* tensor) {
    static bool has_failed = false;
    if (has_failed && !is_exchanged(tensor)) return false;
    const Object requires_grad(PyObject_GetAttr(tensor, state.requires_grad));
    DLTensor view;
    if (!requires_grad || state.exchange->dltensor_from_py_object_no_sync(tensor, &view) != 0) {
      PyErr_Clear();
      has_failed = true;
      return false;
    }
    text_.push_back(requires_grad.get() == Py_True ? 'g' : 't');
    add(view.dtype.code);
    add(view.dtype.bits);
    add(static_cast<unsigned char>(view.device.device_type));
    add(static_cast<unsigned char>(view.device.device_id));
    add(static_cast<unsigned char>(view.ndim));
    if (view.device.device_type == kDLCUDA) {
      text_[0] = static_cast<char>(std::max<int>(text_[0], view.device.device_id + 1));
    }
    note_size(view);
    return true;
  }

  void note_size(const DLTensor& view) {
    if (first_ < 0) {
      text_.append(reinterpret_cast<const char*>(view.shape), static_cast<std::size_t>(view.ndim) * sizeof *view.shape);
      return;
    }
    std::uint64_t numel = 1;
    for (int axis = 0; axis < view.ndim; ++axis) numel *= static_cast<std::uint64_t>(view.shape[axis]);
    char bits = 0;
    for (; numel; numel >>= 1) ++bits;
    text_.push_back(bits);
  }

  const Py_ssize_t first_;
  const long deep_;
  std::string text_ = std::string(1, '\0');
};

}  // namespace

PyObject* kind(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 5 || !PyTuple_Check(given[0]) || !PyDict_Check(given[1]) || !PyTuple_Check(given[2])) {
    PyErr_SetString(PyExc_TypeError, "accepted are a tuple, a dict, a tuple and two numbers");
    return nullptr;
  }
  const Py_ssize_t first = PyLong_AsSsize_t(given[3]);
  const long deep = PyLong_AsLong(given[4]);
  if (PyErr_Occurred()) return nullptr;
  try {
    Key key(first, deep);
    key.note_all(given[2]);
    key.note_all(given[0]);
    key.note_values(given[1], -1, deep);
    return key.bytes();
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

}  // namespace epigemm::python
