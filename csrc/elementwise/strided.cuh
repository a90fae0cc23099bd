// D = epilogue(x) where x and the result lie in any order: one element after another.
#pragma once

#include "elementwise/kernel.cuh"
#include "elementwise/problem.h"

namespace epigemm::cuda {

struct StridedIndex {
  int dimensions;
  int64_t sizes[kMaxDimensions];
  int64_t strides[StridedProblem::kTensors][kMaxDimensions];
};

template <class Element>
struct StridedArguments {
  StridedIndex index;
  const void* x;
  void* out;
  int64_t elements;
  open::Operands<typename ComputeType<Element>::type> operands;
};

// The offsets of an element, by division. `Linear` is 32 bits where the element count allows: 64-bit division costs
// three times as much.
template <class Functor, class Linear, class Element>
__device__ __forceinline__ void run_strided(const StridedArguments<Element>& p) {
  constexpr int kTensors = Functor::kReadsColumns ? StridedProblem::kTensors : StridedProblem::kColumn;
  const auto elements = static_cast<Linear>(p.elements);
  for (Linear i = Linear(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += Linear(gridDim.x) * kThreads) {
    int64_t offsets[kTensors] = {};
    Linear rest = i;
    for (int axis = p.index.dimensions - 1; axis >= 0; --axis) {
      const Linear size = static_cast<Linear>(p.index.sizes[axis]);
      const Linear quotient = rest / size;
      const int64_t coordinate = rest - quotient * size;
      rest = quotient;
#pragma unroll
      for (int tensor = 0; tensor < kTensors; ++tensor) offsets[tensor] += coordinate * p.index.strides[tensor][axis];
    }
    const int64_t column = Functor::kReadsColumns ? offsets[kTensors - 1] : 0;
    const EpilogueOf<Functor, Element, 1> epilogue(p.operands, column, /*columns=*/0, {}, kIsAbsentNegative<Element>);
    const typename ComputeType<Element>::type value[1] = {
        to_compute(static_cast<const Element*>(p.x)[offsets[StridedProblem::kX]])};
    typename ComputeType<Element>::type result[1];
    epilogue.apply(value, epilogue.row(0), result);
    store<Element, 1>(p.out, offsets[StridedProblem::kOut], result);
  }
}

}  // namespace epigemm::cuda
