// Changes of watched objects, counted as CPython tells of them.
#pragma once

#include "python/object.h"

namespace epigemm::python {

// watch(*objects) -> bool: whether each change of these dictionaries and classes is counted from now on, up to the next
// one of the same class: it has to be watched again after that. False before CPython 3.12.
PyObject* watch(PyObject*, PyObject* const* given, Py_ssize_t count);

// changes() -> int: how often something watched, or the code of any function, has changed.
PyObject* changes(PyObject*, PyObject* const*, Py_ssize_t);

}  // namespace epigemm::python
