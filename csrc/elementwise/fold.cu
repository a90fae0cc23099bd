#include "elementwise/fold.h"

#include "device/launch.h"
#include "elementwise/typed_vector.cuh"

namespace epigemm {
namespace {

template <class Element>
__global__ void fold_kernel(FoldProblem problem) {
  const int64_t column = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= problem.columns) return;
  const FoldedColumn folded = fold_column(problem, column, [](const FoldVector& vector, int64_t at, double absent) {
    return cuda::load(vector, at, absent);
  });
  static_cast<Element*>(problem.multiplier)[column] = static_cast<Element>(folded.multiplier);
  static_cast<Element*>(problem.offset)[column] = static_cast<Element>(folded.offset);
}

}  // namespace

const char* fold_cuda(const FoldProblem& problem) {
  constexpr int kThreads = 128;
  if (problem.columns == 0) return nullptr;
  const auto blocks = static_cast<unsigned>((problem.columns + kThreads - 1) / kThreads);
  const cuda::LaunchShape shape{dim3(blocks),   dim3(kThreads), /*cluster=*/dim3(1), /*shared_bytes=*/0,
                                problem.device, problem.stream, /*dependent=*/false};
  FoldProblem argument = problem;
  void* parameters[] = {&argument};
  const bool is_double = problem.element == ElementType::Float64;
  return is_double ? cuda::launch<&fold_kernel<double>>(shape, parameters)
                   : cuda::launch<&fold_kernel<float>>(shape, parameters);
}

}  // namespace epigemm
