// The host's half of the elementwise kernels: no device code in here.
#include "elementwise/launch.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include "elementwise/kernel.cuh"
#include "elementwise/strided.cuh"

namespace epigemm::cuda {
namespace {

template <class Compute>
open::Operands<Compute> as(const SlotOperands& from) {
  open::Operands<Compute> to{};
  std::copy(std::begin(from.data), std::end(from.data), to.data);
  std::copy(std::begin(from.matrix_strides), std::end(from.matrix_strides), to.matrix_strides);
  std::copy(std::begin(from.shared_rows), std::end(from.shared_rows), to.shared_rows);
  for (int i = 0; i < open::kScalars; ++i) to.scalars[i] = static_cast<Compute>(from.scalars[i]);
  return to;
}

template <class Arguments>
const char* enqueue(const void* kernel, int64_t blocks, Arguments& arguments, void* stream) {
  if (blocks > std::numeric_limits<int32_t>::max()) return "the matrix has too many elements for one kernel";
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  void* parameters[] = {&arguments};
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel, parameters);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // it is reported here: no later call is to find it
  return cudaGetErrorString(error);
}

// The grid of a kernel whose threads have a part of a matrix each.
template <class Arguments>
const char* enqueue_walk(const void* kernel, const Walk& walk, int width, int rows_of_thread, Arguments& arguments,
                         void* stream) {
  const Tiling tiling = Tiling::of(walk.m, walk.n, walk.is_wide ? width : 1, rows_of_thread);
  arguments.frame = {walk.m, walk.n, tiling, Divider::by(walk.period), walk.is_wide};
  return enqueue(kernel, tiling.blocks(), arguments, stream);
}

// The grid of the kernel that sums columns.
template <class Element>
const char* enqueue_sums(const void* kernel, const DerivativeProblem& problem,
                         DerivativeArguments<Element>& arguments) {
  arguments.frame = {problem.m, problem.n, {}, {}, true};
  arguments.partial_sums = problem.partial_sums;
  arguments.rows_of_part = bands::divided_up(problem.m, problem.parts);
  const int64_t blocks = bands::divided_up(problem.n, bands::kBand<kWidth<Element>>) * problem.parts;
  return enqueue(kernel, blocks, arguments, problem.stream);
}

}  // namespace

const char* launch_elementwise(const ElementwiseProblem& problem, const KernelForms& kernel) {
  if (problem.m <= 0 || problem.n <= 0) return nullptr;
  return with_element_type(problem.element, [&](auto element) {
    using Element = decltype(element);
    ElementwiseArguments<Element> arguments{{},
                                            problem.x,
                                            problem.out,
                                            problem.x_row_stride,
                                            problem.out_row_stride,
                                            as<typename ComputeType<Element>::type>(problem.operands)};
    const Walk walk = walk_of(problem);
    if (walk.is_whole && kernel.most) {
      return enqueue_walk(kernel.most, walk, kWidth<Element>, kernel.rows_of_most, arguments, problem.stream);
    }
    const int rows = kernel.most ? 1 : kRowsOfThread<Element>;
    return enqueue_walk(kernel.any, walk, kWidth<Element>, rows, arguments, problem.stream);
  });
}

const char* launch_derivative(const DerivativeProblem& problem, const KernelForms& kernel) {
  if (problem.m <= 0 || problem.n <= 0) return nullptr;
  return with_element_type(problem.element, [&](auto element) {
    using Element = decltype(element);
    DerivativeArguments<Element> arguments{{},
                                           problem.grad,
                                           problem.acc,
                                           problem.grad_row_stride,
                                           problem.acc_row_stride,
                                           problem.is_acc_of_compute,
                                           {},
                                           {},
                                           as<typename ComputeType<Element>::type>(problem.operands),
                                           nullptr,
                                           0};
    for (int i = 0; i < 1 + open::kSlots; ++i) {
      const Gradient& gradient = i == 0 ? problem.of_acc : problem.of_slot[i - 1];
      arguments.out[i] = gradient.out;
      arguments.is_out_of_compute[i] = gradient.is_of_compute;
    }
    if (problem.partial_sums) return enqueue_sums(kernel.any, problem, arguments);
    const Walk walk = walk_of(problem);
    const bool is_most = walk.is_whole && kernel.most && is_of_accumulator_alone(problem);
    return enqueue_walk(is_most ? kernel.most : kernel.any, walk, kWidth<Element>, /*rows_of_thread=*/1, arguments,
                        problem.stream);
  });
}

const char* launch_strided(const StridedProblem& problem, const KernelForms& kernel) {
  return with_element_type(problem.element, [&](auto element) {
    using Element = decltype(element);
    StridedArguments<Element> arguments{
        {}, problem.x, problem.out, problem.elements(), as<typename ComputeType<Element>::type>(problem.operands)};
    arguments.index.dimensions = problem.dimensions;
    std::copy_n(problem.sizes, problem.dimensions, arguments.index.sizes);
    for (int tensor = 0; tensor < StridedProblem::kTensors; ++tensor) {
      std::copy_n(problem.strides[tensor], problem.dimensions, arguments.index.strides[tensor]);
    }
    const int64_t wanted = bands::divided_up(arguments.elements, kThreads);
    const int64_t blocks = std::min<int64_t>(wanted, int64_t(problem.multiprocessors) * 32);
    // A grid's stride beyond the last element must not wrap around.
    const bool is_short = arguments.elements < (int64_t(1) << 31);
    return enqueue(is_short ? kernel.most : kernel.any, blocks, arguments, problem.stream);
  });
}

}  // namespace epigemm::cuda
