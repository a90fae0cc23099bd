// The host's half of the open elementwise kernels: no device code in here.
#include "elementwise/open.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include "elementwise/open.cuh"

namespace epigemm::cuda {
namespace {

// The matrix of a problem, and its properties that decide in which order threads pass over it.
struct Walk {
  int64_t m, n;
  int64_t period;  // see OpenFrame
  bool is_wide;
};

bool starts_wide(const void* data) { return reinterpret_cast<uintptr_t>(data) % kOpenBytes == 0; }

// Rows that lie without gaps are one long row, unless something is read by its row (or by a
// matrix that shares rows), or by its column where rows begin
// at whole vectors anyway.
class Walker {
 public:
  Walker(int64_t m, int64_t n, int width) : m_(m), n_(n), width_(width) {}

  void add_matrix(const void* data, int64_t row_stride) {
    if (!data) return;
    has_gaps_ = has_gaps_ || (m_ > 1 && row_stride != n_);
    is_wide_ = is_wide_ && starts_wide(data) && (m_ == 1 || row_stride % width_ == 0);
    is_wide_in_one_row_ = is_wide_in_one_row_ && starts_wide(data);
  }
  void add_operands(const OpenOperands& operands) {
    for (int number = 1; number < kOperandKinds; ++number) {
      const OperandKind kind = static_cast<OperandKind>(number);
      for (int i = 0; i < traits_of(kind).most; ++i) add_operand(traits_of(kind), operands, open::first_slot(kind), i);
    }
  }
  Walk walk() const {
    const bool is_one_row = !has_gaps_ && !has_row_vectors_;
    if (is_one_row && !has_column_vectors_) return {1, m_ * n_, 0, is_wide_in_one_row_};
    if (is_one_row && !is_wide_ && is_wide_in_one_row_ && n_ >= width_) return {1, m_ * n_, n_, true};
    return {m_, n_, 0, is_wide_};
  }

 private:
  void add_operand(KindTraits traits, const OpenOperands& operands, int first_slot, int i) {
    const void* const data = operands.data[first_slot + i];
    if (traits.by_row && traits.by_column) {
      has_row_vectors_ = has_row_vectors_ || (data && operands.shared_rows[i].multiplier != 0);
      return add_matrix(data, operands.matrix_strides[i]);
    }
    if (!traits.by_row && !traits.by_column) return;
    bool& has_vectors = traits.by_row ? has_row_vectors_ : has_column_vectors_;
    has_vectors = has_vectors || data;
    if (traits.by_column) is_wide_ = is_wide_ && starts_wide(data);
  }

  int64_t m_, n_;
  int width_;
  bool has_gaps_ = false, has_row_vectors_ = false, has_column_vectors_ = false, is_wide_ = true,
       is_wide_in_one_row_ = true;
};

template <class Compute>
open::Operands<Compute> as(const OpenOperands& from) {
  open::Operands<Compute> to{};
  std::copy(std::begin(from.data), std::end(from.data), to.data);
  std::copy(std::begin(from.matrix_strides), std::end(from.matrix_strides), to.matrix_strides);
  std::copy(std::begin(from.shared_rows), std::end(from.shared_rows), to.shared_rows);
  for (int i = 0; i < open::kScalars; ++i) to.scalars[i] = static_cast<Compute>(from.scalars[i]);
  return to;
}

// The grid, and the kernel's argument that describes it.
template <class Arguments>
const char* enqueue(const void* kernel, const Walk& walk, int width, int rows_of_thread, Arguments& arguments,
                    void* stream) {
  const OpenTiling tiling = open_tiling(walk.m, walk.n, walk.is_wide ? width : 1, rows_of_thread);
  if (tiling.blocks > std::numeric_limits<int32_t>::max()) return "the matrix has too many elements for one kernel";
  arguments.frame = {walk.m, walk.n, walk.period, static_cast<uint32_t>(tiling.blocks_across), walk.is_wide};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tiling.blocks));
  config.blockDim = dim3(static_cast<unsigned>(tiling.across), static_cast<unsigned>(tiling.down()));
  config.stream = static_cast<cudaStream_t>(stream);
  void* parameters[] = {&arguments};
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel, parameters);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* launch_open_elementwise(const OpenElementwise& problem, const void* kernel) {
  if (problem.m <= 0 || problem.n <= 0) return nullptr;
  return with_element_type(problem.element, [&](auto element) {
    using Element = decltype(element);
    Walker walker(problem.m, problem.n, kOpenWidth<Element>);
    walker.add_matrix(problem.x, problem.x_row_stride);
    walker.add_matrix(problem.out, problem.out_row_stride);
    walker.add_operands(problem.operands);
    OpenElementwiseArguments<Element> arguments{{},
                                                problem.x,
                                                problem.out,
                                                problem.x_row_stride,
                                                problem.out_row_stride,
                                                as<typename ComputeType<Element>::type>(problem.operands)};
    return enqueue(kernel, walker.walk(), kOpenWidth<Element>, kOpenRows<Element>, arguments, problem.stream);
  });
}

const char* launch_open_derivative(const OpenDerivative& problem, const void* kernel) {
  if (problem.m <= 0 || problem.n <= 0) return nullptr;
  return with_element_type(problem.element, [&](auto element) {
    using Element = decltype(element);
    Walker walker(problem.m, problem.n, kOpenWidth<Element>);
    walker.add_matrix(problem.grad, problem.grad_row_stride);
    walker.add_matrix(problem.acc, problem.acc_row_stride);
    walker.add_operands(problem.operands);
    OpenDerivativeArguments<Element> arguments{{},
                                               problem.grad,
                                               problem.acc,
                                               problem.grad_row_stride,
                                               problem.acc_row_stride,
                                               problem.is_acc_of_compute,
                                               {},
                                               {},
                                               as<typename ComputeType<Element>::type>(problem.operands)};
    for (int i = 0; i < 1 + open::kSlots; ++i) {
      const OpenGradient& gradient = i == 0 ? problem.of_acc : problem.of_slot[i - 1];
      walker.add_matrix(gradient.out, problem.n);
      arguments.out[i] = gradient.out;
      arguments.is_out_of_compute[i] = gradient.is_of_compute;
    }
    const Walk walk = walker.walk();
    return enqueue(kernel, walk, kOpenWidth<Element>, /*rows_of_thread=*/1, arguments, problem.stream);
  });
}

}  // namespace epigemm::cuda
