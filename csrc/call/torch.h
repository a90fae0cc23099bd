// What a call needs from PyTorch: memory and its GEMM. The bindings (csrc/python, csrc/torch) implement it with their
// own handles.
#pragma once

#include "call/tensor.h"

namespace epigemm::call {

struct Record;

// How much of a linear call PyTorch's GEMM computes.
enum class Gemm { Product, WithBias, WithBiasAndReLU };

// The result of a call. All but the first two are reasons: nothing was launched or written. What Python does about each
// of them is called a remedy (python/epigemm/calls/resolve.py).
enum class Answer {
  Done,             // the result is there
  Raised,           // there is a Python error, from PyTorch or from Torch::raise
  NotPlain,         // not for plain calls: the binding cannot read the arguments, or a mode or a tracer is on
  DoesNotFit,       // the arguments do not fit each other
  IsEmpty,          // nothing is multiplied
  NotReady,         // the device is not known yet
  MayOverlap,       // `out` may share memory with an argument
  NotStorable,      // no kernel can write to `out` with its layout
  NotReadable,      // no kernel can read the tensors with their layouts
  NoMemory,         // none for a workspace
  NotFused,         // the call is strict, and no fused kernel would run
  OtherSetting,     // PyTorch's GEMM needs another fp32 setting
  NotLinked,        // the epilogue was not linked yet into the kernel that would run
  Recorded,         // plain except for autograd: some tensor requires a gradient
  ByReference,      // epigemm has no kernel for the epilogue: PyTorch's operators compute it
  RecordedByTorch,  // Recorded, and PyTorch's own operators should record it (recorded.h)
  NoPair,           // no kernel would compute a pair of products: the second product has to be given as a matrix
};

class Torch {
 public:
  // The result: a new tensor, or the caller's `out`. False after an error of PyTorch.
  virtual bool result(Tensor* result) = 0;
  // Memory on x's device, aligned to 256 bytes; nullptr if there is none.
  virtual void* workspace(int64_t bytes) = 0;
  // PyTorch's GEMM into the result, which is a contiguous matrix. `bias`: if the GEMM adds one, its position among the
  // call's operands, or among the vectors of a fold. False after an error of PyTorch.
  virtual bool gemm(Gemm gemm, int bias, Tensor* result) = 0;
  // PyTorch's current stream on x's device. False if there is none.
  virtual bool stream(void** stream) = 0;
  // Makes the call end with a RuntimeError.
  virtual void raise(const char* message) = 0;
  // For a dry run: the record of what would be launched.
  virtual Record* record() { return nullptr; }

 protected:
  ~Torch() = default;
};

}  // namespace epigemm::call
