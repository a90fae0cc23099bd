// What a call needs of PyTorch: memory and its GEMM. Each binding implements it over its own handles.
#pragma once

#include "call/tensor.h"
#include "elementwise/problem.h"

namespace epigemm::call {

struct Record;

// How much of a linear call PyTorch's GEMM does.
enum class Gemm { Product, WithBias, WithBiasAndReLU };

// Where a call ended. All but the first two: nothing was launched or written, and this stands in the way. Python's
// table of deeds (python/epigemm/calls/deeds.py) says what is done about each.
enum class Answer {
  Done,             // the result is there
  Raised,           // PyTorch has raised; or see Torch::raise
  NotPlain,         // not for plain calls: the binding cannot read the arguments, or a mode or a tracer is on
  DoesNotFit,       // the arguments do not fit each other
  IsEmpty,          // nothing is multiplied
  NotReady,         // the device was not looked at yet
  MayOverlap,       // `out` may share memory with an argument
  NotStorable,      // the result cannot be written to `out` as it lies
  NotReadable,      // tensors cannot be read as they lie
  LacksPack,        // the weight's fp16 slices have to be made
  NoMemory,         // none for a workspace
  NotFused,         // the call is strict, and no fused kernel would run
  OtherSetting,     // PyTorch's GEMM needs another fp32 setting
  NotLinked,        // the epilogue was not linked yet into the kernel that would run
  Recorded,         // a plain call but for autograd: some tensor requires a gradient
  ByReference,      // no kernel of epigemm's is there for the epilogue: PyTorch's operators compute it
  RecordedByTorch,  // Recorded, and PyTorch's own operators do it best (recorded.h)
  NoPair,           // no kernel would compute a pair of products: the second one has to be there as a matrix
};

class Torch {
 public:
  // The result: a new one, or the caller's `out`. False after an error of PyTorch's.
  virtual bool result(Tensor* result) = 0;
  // Bytes on x's device, aligned to 256; nullptr where there is no memory.
  virtual void* workspace(int64_t bytes) = 0;
  // PyTorch's GEMM into the result, which is a contiguous matrix. `bias`: where it adds one, its place among what the
  // call gives, be it operands or the vectors of a fold. False after an error of PyTorch's.
  virtual bool gemm(Gemm gemm, int bias, Tensor* result) = 0;
  // The stream that PyTorch runs on, on x's device. False where it has none.
  virtual bool stream(void** stream) = 0;
  // Runs an elementwise problem on a CPU, on PyTorch's threads.
  virtual void run_on_cpu(const ElementwiseProblem& problem) = 0;
  virtual void run_derivative_on_cpu(const DerivativeProblem& problem) = 0;
  // Has the call end in a RuntimeError.
  virtual void raise(const char* message) = 0;
  // Of a dry run: where what would be launched is written instead.
  virtual Record* record() { return nullptr; }

 protected:
  ~Torch() = default;
};

}  // namespace epigemm::call
