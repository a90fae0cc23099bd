// Plain calls: on plain tensors, and not to be intercepted by autograd, a tracer or a mode.
#pragma once

#include "call/forced.h"
#include "python/object.h"

namespace epigemm::python {

// Whether a function of PyTorch returns False, None or 0.
bool is_off(PyObject* function);

// Whether no mode, tracer or transform is active. `*is_recording`: whether gradients are enabled.
bool is_seen_by_nobody(bool* is_recording);

// Whether, in addition, neither autocast nor a profiler is active. Under autocast PyTorch's GEMM would cast its
// operands, unless they are known to be cast; with a profiler Python makes the call, so that it has a name in the
// profile.
bool is_plain_here(bool is_cast, bool* is_recording);

// Reads tensor arguments of one call.
class Reader {
 public:
  // `circumstances`: of call::Circumstances.
  explicit Reader(long circumstances)
      : is_routed_(circumstances & call::kRouted), is_cast_(circumstances & call::kCast) {}

  // False if the call is not plain, whatever its tensors are.
  bool begin() { return is_routed_ || is_plain_here(is_cast_, &is_recording_); }
  // The same, also while a profiler is active.
  bool begin_seen() { return is_seen_by_nobody(&is_recording_); }

  // Reads a tensor of any type; false if a plain or recorded call may not read it.
  bool read_any(PyObject* object, call::Tensor* tensor);
  // The same of a type that calls compute in.
  bool read(PyObject* object, call::Tensor* tensor);
  // Reads a tensor or None, for which `*pointer` is null.
  bool read_optional(PyObject* object, call::Tensor* storage, const call::Tensor** pointer);
  // The same of int32.
  bool read_integers(PyObject* object, call::Tensor* storage, const call::Tensor** pointer);
  // Reads a number, a tensor or None.
  bool read_operand(PyObject* object, call::Tensor* storage, call::GivenOperand* operand);

  // Done for a plain call whose arguments could all be read; else the reason why it is not plain.
  call::Answer found(bool is_read) const;

 private:
  bool is_routed_, is_cast_;
  bool is_recording_ = false;
  bool needs_gradient_ = false;
  bool is_in_memory_ = true;
};

// Reads a tensor that PyTorch has made for the call.
bool view_of(PyObject* object, call::Tensor* tensor);

}  // namespace epigemm::python
