// Folding a per-column bias and scale and inference BatchNorm into one multiply-add per column,
//   multiplier = scale * g,  offset = (bias * scale - mean) * g + beta,  g = gamma / sqrt(variance + eps),
// so that multiplier * acc + offset = batch_norm((acc + bias) * scale). Absent vectors are left out, and not multiplied
// as zeros, which an infinity would make NaN; without a variance g = gamma (scale alone, no normalisation).
#pragma once

#include <cmath>

#include "device/element.h"
#include "epilogue/operands.h"

namespace epigemm {

// A vector whose element type is known at run time only: folding touches N elements, not M * N.
struct FoldVector {
  const void* data = nullptr;  // null = absent
  int64_t stride = 0;
  ElementType element = ElementType::Float32;
};

struct WrittenVector {
  void* data = nullptr;  // null = not wanted
  int64_t stride = 0;
  ElementType element = ElementType::Float32;
};

struct FoldProblem {
  FoldVector bias, scale, mean, variance, gamma, beta;
  double eps = 0;
  int64_t columns = 0;
  void* multiplier = nullptr;  // contiguous, fp32 or fp64
  void* offset = nullptr;
  ElementType element = ElementType::Float32;
  int device = 0;
  void* stream = nullptr;
};

struct FoldedColumn {
  double multiplier, offset;
};

// Load(vector, column, absent) -> double. In double throughout, rounded once by the caller: the difference bias * scale
// - mean cancels, and N elements cost nothing.
template <class Load>
EPIGEMM_HOST_DEVICE FoldedColumn fold_column(const FoldProblem& p, int64_t column, Load load) {
  const double scale = load(p.scale, column, 1.0);
  double g = load(p.gamma, column, 1.0);
  if (p.variance.data) g /= sqrt(load(p.variance, column, 1.0) + p.eps);
  const double shifted = (p.bias.data ? load(p.bias, column, 0.0) * scale : 0.0) - load(p.mean, column, 0.0);
  const bool is_shifted = p.bias.data || p.mean.data;
  return {scale * g, (is_shifted ? shifted * g : 0.0) + load(p.beta, column, 0.0)};
}

// Returns nullptr, or what was refused and why.
const char* fold_cuda(const FoldProblem& problem);

}  // namespace epigemm
