#include "elementwise/problem.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace epigemm {
namespace {

void swap_axes(ElementwiseProblem& problem, int a, int b) {
  std::swap(problem.sizes[a], problem.sizes[b]);
  for (auto& strides : problem.strides) std::swap(strides[a], strides[b]);
}

void remove_axis(ElementwiseProblem& problem, int axis) {
  for (int i = axis; i + 1 < problem.dimensions; ++i) swap_axes(problem, i, i + 1);
  --problem.dimensions;
}

// Stable insertion sort: there are few axes, and those of equal strides keep torch's order.
void order_by_out_stride(ElementwiseProblem& problem) {
  const int64_t* out = problem.strides[ElementwiseProblem::kOut];
  for (int i = 1; i < problem.dimensions; ++i) {
    for (int j = i; j > 0 && out[j - 1] < out[j]; --j) swap_axes(problem, j - 1, j);
  }
}

bool can_merge_with_next(const ElementwiseProblem& problem, int axis) {
  return std::all_of(std::begin(problem.strides), std::end(problem.strides), [&](const int64_t* strides) {
    return strides[axis] == strides[axis + 1] * problem.sizes[axis + 1];
  });
}

}  // namespace

void simplify(ElementwiseProblem& problem) {
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

bool is_contiguous(const ElementwiseProblem& problem) {
  const int last = problem.dimensions - 1;
  if (problem.dimensions > 2) return false;
  const EpilogueInfo& epilogue = epilogue_info(problem.epilogue);
  for (int tensor : {ElementwiseProblem::kOut, ElementwiseProblem::kX}) {
    const int64_t* strides = problem.strides[tensor];
    if (strides[last] != 1 || (last == 1 && strides[0] != problem.sizes[1])) return false;
  }
  for (int i = 1; i < epilogue.operand_count; ++i) {
    const int64_t* strides = problem.strides[ElementwiseProblem::kFirstOperand + i - 1];
    const bool vector = epilogue.operands[i].kind == OperandKind::PerColumn && problem.operands[i - 1].data;
    if (vector && (strides[last] != 1 || (last == 1 && strides[0] != 0))) return false;
  }
  return true;
}

bool can_sum_columns(const DerivativeProblem& problem) {
  constexpr int64_t kVectorBytes = 16;
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0; };
  if (problem.elements() == 0 || problem.columns() * element_bytes(problem.element) % kVectorBytes != 0) return false;
  bool found = aligned(problem.grad) && aligned(problem.x);
  for (const OperandValue& operand : problem.operands) found = found && aligned(operand.data);
  return found;
}

int64_t sum_chunks(const DerivativeProblem& problem) {
  constexpr int64_t kWantedCtas = 1024, kBandBytes = 512, kLeastRows = 32;
  const int64_t bands = (problem.columns() * element_bytes(problem.element) + kBandBytes - 1) / kBandBytes;
  const int64_t most = std::max<int64_t>(problem.rows() / kLeastRows, 1);
  return std::clamp<int64_t>((kWantedCtas + bands - 1) / bands, 1, most);
}

}  // namespace epigemm
