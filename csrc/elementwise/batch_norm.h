// BatchNorm in training, behind u = x @ weight.T + bias, and its derivative. With the mean and the biased variance of
// u's columns, and a scale per column (1 if absent),
//   y = (u - mean) * slope + beta,  slope = gamma * t,  t = scale / sqrt(scale^2 * variance + eps),
// which is batch_norm(u * scale): a scale multiplies the mean, and its square the variance. So u * scale is not needed,
// and no derivative divides by the scale. Absent vectors are their neutral elements.
//
// With g = grad (0 where a ReLU has cut y), S1 = sum(g), S2 = sum(g * (u - mean)) over M rows:
//   grad_u     = slope * (g - S1 / M - (u - mean) * t^2 * S2 / M)
//   grad_beta  = S1,  grad_gamma = t * S2
//   grad_scale = sum(grad_u * u) / scale = gamma * eps * S2 / sqrt(scale^2 * variance + eps)^3
//   grad_bias  = sum(grad_u) = 0, NaN if S1 is not finite: a shift of u changes nothing
#pragma once

#include "elementwise/fold.h"

namespace epigemm {

struct BatchNorm {
  ElementType element = ElementType::Float32;
  int64_t rows = 0, columns = 0;
  const void* u = nullptr;         // contiguous, as all matrices here
  const void* mean = nullptr;      // of the arithmetic's type: fp32, or fp64 for fp64
  const void* variance = nullptr;  // as the mean
  FoldVector scale, gamma, beta;
  double eps = 0;
  bool relu = false;  // y is relu(...)
  int device = 0;
  void* stream = nullptr;
};

// Running statistics follow with weight `momentum`, or with 1 / *tracked where that is given.
struct BatchNormForward : BatchNorm {
  void* y = nullptr;
  WrittenVector running_mean, running_variance;  // also read
  const int64_t* tracked = nullptr;
  double momentum = 0;
  int64_t* counted = nullptr;  // incremented; not `tracked`, which several CTAs read
  // Where the moments of blocks of u's rows were not merged yet: they are merged here, into merged_mean and
  // merged_variance, and `mean` and `variance` are not read. At most kMostMergedBehind blocks (csrc/reduce).
  const void* blocks = nullptr;
  int block_rows = 0;
  void *merged_mean = nullptr, *merged_variance = nullptr;
};

struct BatchNormBackward : BatchNorm {
  const void* grad = nullptr;
  void* grad_u = nullptr;  // null = not wanted
  WrittenVector grad_scale, grad_gamma, grad_beta, grad_bias;
  // [2 * chunks + 3, columns] of the arithmetic's type: two sums of each chunk of rows, and three factors.
  void* workspace = nullptr;
  int64_t chunks = 1;
};

// Both return nullptr, or what was refused and why. The sums are added in an order that depends on the shape, the type
// and `chunks` alone.
const char* batch_norm_forward_cuda(const BatchNormForward& problem);
const char* batch_norm_backward_cuda(const BatchNormBackward& problem);

}  // namespace epigemm
