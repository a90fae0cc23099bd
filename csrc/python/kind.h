// The kinds of a fused model's calls.
#pragma once

#include "python/object.h"

namespace epigemm::python {

// kind(about, is_known, args, kwargs) -> True | int | None | False: what is known of a call, see kind.cpp.
PyObject* kind(PyObject*, PyObject* const* given, Py_ssize_t count);

}  // namespace epigemm::python
