// What tells the calls of a fused model apart.
#pragma once

#include "python/object.h"

namespace epigemm::python {

// kind(args, kwargs, modes, first, deep) -> bytes: equal for calls that are not told apart.
//   modes: a tuple of what is seen beside the arguments
//   first: so many values of a container are looked at, -1 for all; then each size and each number is told apart, too
//   deep: so many containers inside of each other are
// Its first byte is one more than the highest index of a GPU with a tensor among the values; 0 where there is none.
PyObject* kind(PyObject*, PyObject* const* given, Py_ssize_t count);

}  // namespace epigemm::python
