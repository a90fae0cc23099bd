// Plain calls: on plain tensors, with no autograd, tracer or mode that must see the call.
#pragma once

#include "call/linear.h"
#include "python/object.h"

namespace epigemm::python {

// Whether a function of PyTorch's returns False, None or 0.
bool is_off(PyObject* function);

// Whether no mode, tracer or transform is at work. `*is_recording`: whether gradients are enabled.
bool is_seen_by_nobody(bool* is_recording);

// Whether, besides, neither autocast nor a profiler is: autocast would have PyTorch's GEMM cast its operands, and a
// profiler is told of the call where Python makes it.
bool is_plain_here(bool* is_recording);

// Reads tensor arguments of one call.
class Reader {
 public:
  // `is_routed`: autograd, tracers and modes are done with the call.
  explicit Reader(bool is_routed) : is_routed_(is_routed) {}

  // False where the call is none for the kernels, whatever its tensors are.
  bool begin() { return is_routed_ || is_plain_here(&is_recording_); }
  // The same of a call that autocast has cast, if it is on.
  bool begin_cast() { return is_seen_by_nobody(&is_recording_); }

  // A tensor; false where it is none that a plain or recorded call may read.
  bool read(PyObject* object, call::Tensor* tensor);
  // The same, or None: `*pointer` is null then.
  bool read_optional(PyObject* object, call::Tensor* storage, const call::Tensor** pointer);
  // A number, a tensor or None.
  bool read_operand(PyObject* object, call::Tensor* storage, call::GivenOperand* operand);

  // Done for a plain call whose arguments could all be read; else why it is not plain.
  call::Answer found(bool is_read) const;

 private:
  bool is_routed_;
  bool is_recording_ = false;
  bool needs_gradient_ = false;
  bool is_in_memory_ = true;
};

// A tensor of PyTorch's making.
bool view_of(PyObject* object, call::Tensor* tensor);

}  // namespace epigemm::python
