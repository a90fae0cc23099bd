// Counts changes of watched objects, as CPython reports them.
#pragma once

#include "python/object.h"

namespace epigemm::python {

// watch(*objects) -> bool: counts changes of these dictionaries and classes from now on. After a change a class has to
// be watched again. Returns whether all of them are watched; False before CPython 3.12.
PyObject* watch(PyObject*, PyObject* const* given, Py_ssize_t count);

// changes() -> int: how many changes there were of watched objects, and of the code of any function.
PyObject* changes(PyObject*, PyObject* const*, Py_ssize_t);

}  // namespace epigemm::python
