// An elementwise call from tensors to the launch: D = epilogue(x).
#pragma once

#include "call/linear.h"
#include "elementwise/problem.h"

namespace epigemm::call {

struct ElementwiseCall {
  EpilogueId epilogue = EpilogueId::sigmoid;
  const Tensor* x = nullptr;
  const Tensor* bias = nullptr;
  const Tensor* vectors[2] = {};   // the epilogue's, after the bias
  const Tensor* scalar = nullptr;  // a number on the device; null: `number`
  double number = 0;
  bool has_number = false;
  const FoldVectors* fold = nullptr;  // in place of the vectors
  const Tensor* out = nullptr;        // the caller's, which may be x itself
};

Answer elementwise(const ElementwiseCall& call, Torch& torch);

}  // namespace epigemm::call
