// What a call needs of PyTorch: memory and its GEMM. Each binding implements it over its own handles.
#pragma once

#include "call/tensor.h"
#include "elementwise/problem.h"

namespace epigemm::call {

// How much of a linear call PyTorch's GEMM does.
enum class Gemm { Product, WithBias, WithBiasAndReLU };

// Where a call ended.
enum class Answer {
  Done,       // the result is there
  Elsewhere,  // nothing was launched or written: the cold path answers, and words what is wrong with the arguments
  Raised,     // PyTorch has raised; or see Torch::raise
};

class Torch {
 public:
  // The result: a new one, or the caller's `out`. False after an error of PyTorch's.
  virtual bool result(Tensor* result) = 0;
  // Bytes on x's device, aligned to 256; nullptr where there is no memory.
  virtual void* workspace(int64_t bytes) = 0;
  // PyTorch's GEMM into the result, which is a contiguous matrix. False after an error of PyTorch's.
  virtual bool gemm(Gemm gemm, Tensor* result) = 0;
  // The stream that PyTorch runs on, on x's device. False where it has none.
  virtual bool stream(void** stream) = 0;
  // Runs an elementwise problem on a CPU, on PyTorch's threads.
  virtual void run_on_cpu(const ElementwiseProblem& problem) = 0;
  // Has the call end in a RuntimeError.
  virtual void raise(const char* message) = 0;

 protected:
  ~Torch() = default;
};

}  // namespace epigemm::call
