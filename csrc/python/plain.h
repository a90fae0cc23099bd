// Plain calls: those that nobody but the kernels has to see, on plain tensors.
#pragma once

#include "call/linear.h"
#include "python/object.h"

namespace epigemm::python {

// Whether no mode, tracer, profiler, transform or autocast is at work. `*is_recording`: whether gradients are enabled.
bool is_plain_here(bool* is_recording);

// Reads tensor arguments of one call.
class Reader {
 public:
  explicit Reader(bool is_recording) : is_recording_(is_recording) {}

  // A tensor; false where it is none that a plain call may read.
  bool read(PyObject* object, call::Tensor* tensor) const;
  // The same, or None: `*pointer` is null then.
  bool read_optional(PyObject* object, call::Tensor* storage, const call::Tensor** pointer) const;
  // A number, a tensor or None.
  bool read_operand(PyObject* object, call::Tensor* storage, call::GivenOperand* operand) const;

 private:
  bool is_recording_;
};

// A tensor of PyTorch's making.
bool view_of(PyObject* object, call::Tensor* tensor);

}  // namespace epigemm::python
