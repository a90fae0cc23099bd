#include "elementwise/problem.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "elementwise/tiling.h"

namespace epigemm {
namespace {

int64_t width_of(ElementType element) { return cuda::kVectorBytes / element_bytes(element); }

bool starts_wide(const void* data) { return reinterpret_cast<uintptr_t>(data) % cuda::kVectorBytes == 0; }

// Rows that lie without gaps are one long row, unless something is read by its row (or by a matrix that shares rows),
// or by its column where rows begin at whole vectors anyway.
class Walker {
 public:
  Walker(int64_t m, int64_t n, int64_t width) : m_(m), n_(n), width_(width) {}

  void add_matrix(const void* data, int64_t row_stride) {
    if (!data) return;
    has_gaps_ = has_gaps_ || (m_ > 1 && row_stride != n_);
    is_wide_ = is_wide_ && starts_wide(data) && (m_ == 1 || row_stride % width_ == 0);
    is_wide_in_one_row_ = is_wide_in_one_row_ && starts_wide(data);
  }
  void add_operands(const SlotOperands& operands) {
    for (int number = 1; number < kOperandKinds; ++number) {
      const OperandKind kind = static_cast<OperandKind>(number);
      for (int i = 0; i < traits_of(kind).most; ++i) add_operand(traits_of(kind), operands, open::first_slot(kind), i);
    }
  }
  Walk walk() const {
    const bool is_one_row = !has_gaps_ && !has_row_vectors_;
    if (is_one_row && !has_column_vectors_) {
      const int64_t elements = m_ * n_;
      return {1, elements, 0, is_wide_in_one_row_, is_wide_in_one_row_ && are_whole(elements)};
    }
    const bool is_countable = n_ >= width_ && n_ <= kMost;
    if (is_one_row && !is_wide_ && is_wide_in_one_row_ && is_countable) return {1, m_ * n_, n_, true, false};
    return {m_, n_, 0, is_wide_, is_wide_ && !has_gaps_ && are_whole(n_)};
  }
  bool has_whole_vectors() const { return is_wide_ && n_ % width_ == 0; }
  bool has_gaps() const { return has_gaps_; }

 private:
  static constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // which the kernels count in 32 bits

  bool are_whole(int64_t columns) const { return columns % width_ == 0 && columns / width_ <= kMost; }
  void add_operand(KindTraits traits, const SlotOperands& operands, int first_slot, int i) {
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

  int64_t m_, n_, width_;
  bool has_gaps_ = false, has_row_vectors_ = false, has_column_vectors_ = false, is_wide_ = true,
       is_wide_in_one_row_ = true;
};

Walker walker_of(const DerivativeProblem& problem) {
  Walker walker(problem.m, problem.n, width_of(problem.element));
  walker.add_matrix(problem.grad, problem.grad_row_stride);
  walker.add_matrix(problem.acc, problem.acc_row_stride);
  walker.add_operands(problem.operands);
  walker.add_matrix(problem.of_acc.out, problem.n);
  for (const Gradient& gradient : problem.of_slot) walker.add_matrix(gradient.out, problem.n);
  return walker;
}

void swap_axes(StridedProblem& problem, int a, int b) {
  std::swap(problem.sizes[a], problem.sizes[b]);
  for (auto& strides : problem.strides) std::swap(strides[a], strides[b]);
}

void remove_axis(StridedProblem& problem, int axis) {
  for (int i = axis; i + 1 < problem.dimensions; ++i) swap_axes(problem, i, i + 1);
  --problem.dimensions;
}

// Stable insertion sort: there are few axes, and those of equal strides keep torch's order.
void order_by_out_stride(StridedProblem& problem) {
  const int64_t* out = problem.strides[StridedProblem::kOut];
  for (int i = 1; i < problem.dimensions; ++i) {
    for (int j = i; j > 0 && out[j - 1] < out[j]; --j) swap_axes(problem, j - 1, j);
  }
}

bool can_merge_with_next(const StridedProblem& problem, int axis) {
  return std::all_of(std::begin(problem.strides), std::end(problem.strides), [&](const int64_t* strides) {
    return strides[axis] == strides[axis + 1] * problem.sizes[axis + 1];
  });
}

}  // namespace

bool has_columns(const SlotOperands& operands) {
  const auto* const first = operands.data + open::kColumn0;
  return std::any_of(first, first + open::kColumns, [](const void* data) { return data != nullptr; });
}

Walk walk_of(const ElementwiseProblem& problem) {
  Walker walker(problem.m, problem.n, width_of(problem.element));
  walker.add_matrix(problem.x, problem.x_row_stride);
  walker.add_matrix(problem.out, problem.out_row_stride);
  walker.add_operands(problem.operands);
  return walker.walk();
}

Walk walk_of(const DerivativeProblem& problem) { return walker_of(problem).walk(); }

bool can_sum_columns(const DerivativeProblem& problem, bool is_compiled) {
  if (problem.m <= 0 || problem.n <= 0) return false;
  const Walker walker = walker_of(problem);
  if (is_compiled && (walker.has_gaps() || !is_of_accumulator_alone(problem))) return false;
  return walker.has_whole_vectors();
}

bool is_of_accumulator_alone(const DerivativeProblem& problem) {
  return std::none_of(std::begin(problem.of_slot), std::end(problem.of_slot),
                      [](const Gradient& gradient) { return gradient.out != nullptr; });
}

int64_t sum_parts(const DerivativeProblem& problem) {
  constexpr int64_t kWantedCtas = 1024, kBandBytes = 512, kLeastRows = 32;
  const int64_t bands = (problem.n * element_bytes(problem.element) + kBandBytes - 1) / kBandBytes;
  const int64_t most = std::max<int64_t>(problem.m / kLeastRows, 1);
  return std::clamp<int64_t>((kWantedCtas + bands - 1) / bands, 1, most);
}

void simplify(StridedProblem& problem) {
  for (int axis = problem.dimensions - 1; axis >= 0; --axis) {
    if (problem.sizes[axis] == 1) remove_axis(problem, axis);
  }
  order_by_out_stride(problem);
  for (int axis = problem.dimensions - 2; axis >= 0; --axis) {
    if (!can_merge_with_next(problem, axis)) continue;
    problem.sizes[axis + 1] *= problem.sizes[axis];
    remove_axis(problem, axis);
  }
  if (problem.dimensions == 0) {  // a single element
    problem.dimensions = 1;
    problem.sizes[0] = 1;
    for (auto& strides : problem.strides) strides[0] = 1;
  }
}

bool as_matrix(const StridedProblem& problem, ElementwiseProblem* matrix) {
  const int last = problem.dimensions - 1;
  const auto& [out, x, column] = problem.strides;
  if (last > 1 || out[last] != 1 || x[last] != 1) return false;
  if (has_columns(problem.operands) && (column[last] != 1 || (last == 1 && column[0] != 0))) return false;
  const int64_t n = problem.sizes[last], m = last == 1 ? problem.sizes[0] : 1;
  *matrix = {
      problem.element, m, n, problem.x, last == 1 ? x[0] : n, problem.out, last == 1 ? out[0] : n, problem.operands,
      problem.stream};
  return true;
}

}  // namespace epigemm
