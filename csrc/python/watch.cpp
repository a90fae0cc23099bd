// CPython's watchers are not part of the limited API, so they are looked up at run time. The callbacks only count.
#include "python/watch.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdint>

namespace epigemm::python {
namespace {

std::atomic<std::int64_t> count{0};

int on_dict(int, PyObject*, PyObject*, PyObject*) {
  ++count;
  return 0;
}

int on_type(PyTypeObject*) {
  ++count;
  return 0;
}

// CPython calls this for all functions, also for each new one.
int on_function(int event, PyObject*, PyObject*) {
  constexpr int kModifyCode = 2;
  if (event == kModifyCode) ++count;
  return 0;
}

template <class Function>
bool find(Function*& function, const char* name) {
  function = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  return function;
}

class Watchers {
 public:
  Watchers() {
    int (*add_dict)(decltype(&on_dict));
    int (*add_type)(decltype(&on_type));
    int (*add_function)(decltype(&on_function));
    if (!find(add_dict, "PyDict_AddWatcher") || !find(add_type, "PyType_AddWatcher") ||
        !find(add_function, "PyFunction_AddWatcher") || !find(watch_dict_, "PyDict_Watch") ||
        !find(watch_type_, "PyType_Watch") || !find(assign_version_, "PyUnstable_Type_AssignVersionTag")) {
      return;
    }
    // An interpreter can have eight watchers of each sort.
    dict_ = add_dict(&on_dict);
    type_ = add_type(&on_type);
    is_ready_ = dict_ >= 0 && type_ >= 0 && add_function(&on_function) >= 0;
    PyErr_Clear();
  }

  bool is_ready() const { return is_ready_; }

  bool watch(PyObject* object) const {
    // CPython reports changes only of a class that has a version, and gives no new version to a class that changes
    // often.
    const bool is_watched = PyDict_Check(object) ? watch_dict_(dict_, object) == 0
                                                 : watch_type_(type_, object) == 0 &&
                                                       assign_version_(reinterpret_cast<PyTypeObject*>(object)) == 1;
    PyErr_Clear();
    return is_watched;
  }

 private:
  int (*watch_dict_)(int, PyObject*) = nullptr;
  int (*watch_type_)(int, PyObject*) = nullptr;
  int (*assign_version_)(PyTypeObject*) = nullptr;
  int dict_ = -1, type_ = -1;
  bool is_ready_ = false;
};

}  // namespace

PyObject* watch(PyObject*, PyObject* const* given, Py_ssize_t count) {
  static const Watchers watchers;
  bool is_watched = watchers.is_ready();
  for (Py_ssize_t i = 0; is_watched && i < count; ++i) is_watched = watchers.watch(given[i]);
  return PyBool_FromLong(is_watched);
}

PyObject* changes(PyObject*, PyObject* const*, Py_ssize_t) { return PyLong_FromLongLong(count); }

}  // namespace epigemm::python
