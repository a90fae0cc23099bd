#include "python/kind.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "python/plain.h"
#include "python/state.h"

namespace epigemm::python {
namespace {

// What is known of a model's calls (Kinds.about in fusion/kinds.py):
//   Model
//   Own: a list that the model's __dict__ holds, and no other object but this tuple
//   Parameters, Name: a dictionary of the model's, and the name of the parameter whose dtype is part of a kind
//   Watchers: a list; nothing is asked while it has items
//   Left: {kind: calls that still run as they were}
//   World: torch's distributed state; None if this torch has none
//   First, Deep: so many values of a container, and containers inside of each other, are looked at
//   OnCudaAlone: whether calls without CUDA tensors have no kind
enum About { Model, Own, Parameters, Name, Watchers, Left, World, First, Deep, OnCudaAlone, kAboutCount };

// Whether there is a default process group. Its processes have had different calls, and have to give equal bits.
bool is_distributed(PyObject* world) {
  if (world == Py_None) return false;
  const Object group(PyObject_GetAttr(world, state.default_group));
  if (!group) PyErr_Clear();
  return group.get() != Py_None;
}

// Whether equal calls have to give equal bits.
bool wants_same_bits(PyObject* world) {
  if (!is_off(state.is_deterministic) || is_distributed(world)) return true;
  if (PyDict_GetItemWithError(state.invariance, state.active) == Py_False) return false;
  PyErr_Clear();
  PyObject* const enabled = PyDict_GetItemWithError(state.invariance, state.enabled);
  return !enabled || !is_off(enabled);
}

// The modes of a call, which are part of its kind.
struct Modes {
  explicit Modes(PyObject* about)
      : is_recording(!is_off(state.is_grad_enabled)),
        is_inference(!is_off(state.is_inference)),
        is_autocast(!is_off(state.any_autocast)),
        is_training(is_true(PyTuple_GetItem(about, Model), state.training)) {}

  static bool is_true(PyObject* object, PyObject* name) {
    const Object found(PyObject_GetAttr(object, name));
    if (!found) PyErr_Clear();
    return found.get() == Py_True;
  }

  // Dtypes are never freed.
  const void* autocast_dtype() const {
    if (!is_autocast) return nullptr;
    const Object found = call(state.autocast_dtype, state.cuda);
    if (!found) PyErr_Clear();
    return found.get();
  }

  // The setting of the caller, even if another thread has switched it for one of its GEMMs; no other thread runs at
  // this time. It is identified by its first letter: "none", "ieee", "tf32" or "bf16".
  static Py_UCS4 fp32_setting() {
    Object found = Object::borrowed(PyDict_GetItemWithError(state.fp32_callers, state.cuda));
    if (!found) found = Object(PyObject_Call(state.fp32_setting, state.fp32_of_cuda, nullptr));
    const Py_UCS4 letter = found ? PyUnicode_ReadChar(found.get(), 0) : 0;
    if (PyErr_Occurred()) PyErr_Clear();
    return letter;
  }

  const bool is_recording, is_inference, is_autocast, is_training;
};

// A hash of a call, value by value, without allocations. A str counts by its hash, another object by the address of its
// class. If two kinds have the same hash, that costs only time.
class Key {
 public:
  Key(Py_ssize_t first, long deep, const Modes& modes) : first_(first), deep_(deep), modes_(modes) {
    add(modes.is_recording | modes.is_inference << 1 | modes.is_autocast << 2 | modes.is_training << 3);
    add(modes.autocast_dtype());
    add(modes.fp32_setting());
  }

  // Of the model's first parameter: model.half() changes no argument that is an index.
  void note_dtype(PyObject* parameter) {
    if (parameter && is_plain(parameter)) add(Object(PyObject_GetAttr(parameter, state.dtype)).get());
    PyErr_Clear();
  }

  void note_all(PyObject* tuple) { note_items(tuple, PyTuple_Size(tuple), &PyTuple_GetItem, deep_); }

  void note_values(PyObject* dict, Py_ssize_t most, long deep) {
    PyObject* value = nullptr;
    for (Py_ssize_t place = 0, i = 0; i != most && PyDict_Next(dict, &place, nullptr, &value); ++i) {
      note(value, deep);
    }
  }

  // Whether there is a CUDA tensor.
  bool has_device() const { return device_ >= 0; }

  // The last eight bits are 0 for a CPU, else one more than the index of the GPU.
  std::uint64_t number() const { return found_ << 8 | static_cast<std::uint64_t>(device_ + 1); }

 private:
  // After SplitMix64, whose finalizer has each bit of its input change about half of the bits.
  void add(std::uint64_t more) {
    found_ += more + 0x9e3779b97f4a7c15;
    found_ = (found_ ^ found_ >> 30) * 0xbf58476d1ce4e5b9;
    found_ = (found_ ^ found_ >> 27) * 0x94d049bb133111eb;
    found_ ^= found_ >> 31;
  }

  void add(const void* object) { add(static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(object))); }

  template <class Number, class = std::enable_if_t<std::is_integral_v<Number>>>
  void add(Number number) {
    add(static_cast<std::uint64_t>(number));
  }

  template <class Value>
  void add(char tag, Value value) {
    add(tag);
    add(value);
  }

  void note_items(PyObject* items, Py_ssize_t count, PyObject* (*item)(PyObject*, Py_ssize_t), long deep) {
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const value = item(items, i);
      if (!value) return PyErr_Clear();  // a list that has become shorter
      note(value, deep);
    }
  }

  void note(PyObject* borrowed, long deep) {
    const Object value = Object::borrowed(borrowed);  // a str of a class of its own may run Python
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(borrowed));
    if (is_plain(borrowed)) {
      return note_tensor(borrowed);
    } else if (borrowed == Py_None || PyBool_Check(borrowed) || type == state.dtype_type) {
      return add('=', borrowed);
    } else if (PyUnicode_Check(borrowed)) {
      const Py_hash_t hash = PyObject_Hash(borrowed);
      if (hash != -1) return add('s', hash);
      PyErr_Clear();
    } else if (deep > 0 && PyTuple_Check(borrowed)) {
      return note_items(borrowed, std::min(PyTuple_Size(borrowed), first_), &PyTuple_GetItem, deep - 1);
    } else if (deep > 0 && PyList_Check(borrowed)) {
      return note_items(borrowed, std::min(PyList_Size(borrowed), first_), &PyList_GetItem, deep - 1);
    } else if (deep > 0 && PyDict_Check(borrowed)) {
      return note_values(borrowed, first_, deep - 1);
    }
    add('o', type);
  }

  static bool is_plain(PyObject* object) {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    return type == state.tensor_type || type == state.parameter_type;
  }

  // Reads attributes: PyTorch's exchange API takes several times as long if its code is in no cache.
  void note_tensor(PyObject* tensor) {
    const Object dtype(PyObject_GetAttr(tensor, state.dtype));
    const long index = number_of(state.get_device_of, tensor);
    add(modes_.is_recording && Modes::is_true(tensor, state.requires_grad) ? 'g' : 't', dtype.get());
    add(index);
    device_ = std::max(device_, index);
    add(bit_length(number_of(state.numel_of, tensor)));
    PyErr_Clear();
  }

  // -1 after an error.
  static long number_of(PyObject* function, PyObject* tensor) {
    const Object found = call(function, tensor);
    return found ? PyLong_AsLong(found.get()) : -1;
  }

  static int bit_length(long number) {
    int bits = 0;
    for (; number > 0; number >>= 1) ++bits;
    return bits;
  }

  const Py_ssize_t first_;
  const long deep_;
  const Modes& modes_;
  long device_ = -1;
  std::uint64_t found_ = 0;
};

// Counts a call that runs the original model. After the last one the kind is removed. False if the kind is not in
// `left`. Null after an error.
PyObject* count_down(PyObject* left, PyObject* key) {
  PyObject* const found = PyDict_GetItemWithError(left, key);
  const long calls = found ? PyLong_AsLong(found) : 0;
  if (PyErr_Occurred()) return nullptr;
  if (!found) Py_RETURN_FALSE;
  if (calls <= 0) {
    if (PyDict_DelItem(left, key) != 0) return nullptr;
    Py_RETURN_FALSE;
  }
  const Object rest(PyLong_FromLong(calls - 1));
  if (!rest || PyDict_SetItem(left, key, rest.get()) != 0) return nullptr;
  Py_RETURN_TRUE;
}

bool is_about(PyObject* about) {
  return PyTuple_Check(about) && PyTuple_Size(about) == kAboutCount &&
         PyDict_Check(PyTuple_GetItem(about, Parameters)) && PyList_Check(PyTuple_GetItem(about, Watchers)) &&
         PyDict_Check(PyTuple_GetItem(about, Left));
}

}  // namespace

// kind(about, is_known, args, kwargs) -> True | int | None | False
//   True: the call runs as it was
//   int: its kind, of which no call is left
//   None: it has no kind
//   False: its caller or the function modes have to be looked at; not where `is_known`, which says that they were
PyObject* kind(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4 || !PyTuple_Check(given[2]) || !PyDict_Check(given[3]) ||
      !(given[0] == Py_None || is_about(given[0]))) {
    PyErr_SetString(PyExc_TypeError, "accepted are what is known of a model's calls, a bool, a tuple and a dict");
    return nullptr;
  }
  PyObject* const about = given[0];
  if (about == Py_None) Py_RETURN_FALSE;
  // Other owners of the model's __dict__, such as a replica of DataParallel, hold the list, too.
  constexpr std::uint32_t kHolders = 2;
  const bool is_known = given[1] == Py_True;
  const auto holders = static_cast<std::uint32_t>(Py_REFCNT(PyTuple_GetItem(about, Own)));
  // Function modes would intercept reads of tensors' attributes.
  if (!is_known && (holders != kHolders || !is_off(state.has_function_mode))) Py_RETURN_FALSE;
  const bool is_watched = PyList_Size(PyTuple_GetItem(about, Watchers)) != 0;
  if (is_watched || wants_same_bits(PyTuple_GetItem(about, World))) Py_RETURN_NONE;
  const Py_ssize_t first = PyLong_AsSsize_t(PyTuple_GetItem(about, First));
  const long deep = PyLong_AsLong(PyTuple_GetItem(about, Deep));
  if (PyErr_Occurred()) return nullptr;
  const Modes modes(about);
  Key key(first, deep, modes);
  key.note_dtype(PyDict_GetItemWithError(PyTuple_GetItem(about, Parameters), PyTuple_GetItem(about, Name)));
  key.note_all(given[2]);
  key.note_values(given[3], -1, deep);
  if (!key.has_device() && PyTuple_GetItem(about, OnCudaAlone) == Py_True) Py_RETURN_NONE;
  Object number(PyLong_FromUnsignedLongLong(key.number()));
  if (!number) return nullptr;
  const Object is_left(count_down(PyTuple_GetItem(about, Left), number.get()));
  if (!is_left) return nullptr;
  if (is_left.get() == Py_True) Py_RETURN_TRUE;
  return number.release();
}

}  // namespace epigemm::python
