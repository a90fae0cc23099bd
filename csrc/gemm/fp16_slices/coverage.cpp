#include "gemm/fp16_slices/coverage.h"

#include "gemm/fp16_slices/problem.h"
#include "gemm/fp16_slices/weight_scale.h"
#include "gemm/grid.h"
#include "gemm/text.h"

namespace epigemm::fp16_slices {
namespace {

// Below, three products of 22 bits are no better than one of 24: rounding the operands, which SGEMM does not do, is
// most of the error. From a recorded sweep (docs/numerics.md): from here on both the largest and the rms error are
// below SGEMM's for every class of dense data.
constexpr int64_t kLeastK = 128;
// With fewer rows SGEMM has kernels that split K into short sums, and is more accurate: its largest error is down to
// 1/2.7 of the split's, its rms error to 1/1.8 (docs/numerics.md). From 16 rows on it sums as at many rows.
constexpr int64_t kLeastRows = 16;
// The single product is summed on the tensor cores alone, which truncate: from 16384 on the error on all-positive data
// would exceed that of cuBLAS's TF32, which splits such long sums.
constexpr int64_t kLeastScaledK = 16, kMostScaledK = 8192;

}  // namespace

bool computes(const Problem& p) {
  return !p.is_pair && is_on_slices(p.arithmetic) && p.x.element == ElementType::Float32 &&
         p.weight.element == ElementType::Float32 && p.out.element == ElementType::Float32;
}

std::string why_not_sizes(const Problem& p) {
  if (p.m <= kLargestExtent && p.n <= kLargestExtent && p.k <= kMostColumns) return std::string();
  return text("M and N must be at most ", kLargestExtent, " and K at most ", kMostColumns);
}

std::string why_not_accurate(const Problem& p) {
  if (p.arithmetic == Arithmetic::Split && p.k < kLeastK) {
    return text("K = ", p.k, " is below ", kLeastK,
                ", from where on the split's error is below that of an IEEE fp32 product");
  }
  // A batch-invariant call must not depend on M, and of groups that are not alike nobody knows how many rows they have.
  const bool does_m_count = !p.is_batch_invariant && (!p.groups || p.groups.are_alike);
  const int64_t rows = p.groups.are_alike ? p.m / p.groups.count : p.m;
  if (p.arithmetic == Arithmetic::Split && rows < kLeastRows && does_m_count) {
    return text("M = ", rows, " is below ", kLeastRows,
                ", from where on the split's error is below that of an IEEE fp32 product");
  }
  if (p.arithmetic == Arithmetic::Scaled && (p.k < kLeastScaledK || p.k > kMostScaledK)) {
    return text("K = ", p.k, " is outside ", kLeastScaledK, "..", kMostScaledK,
                ", where one scaled fp16 product is as accurate as TF32");
  }
  return std::string();
}

int64_t workspace_bytes(const Problem& p) {
  if (!is_on_slices(p.arithmetic)) return 0;
  const int slices = slices_of(p.arithmetic);
  return split_bytes(p.m, p.k, slices) + (p.packed_weight ? 0 : split_bytes(p.n, p.k, slices));
}

int64_t workspace_bytes_as_it_lies(const Problem& p) {
  return split_bytes(p.m, p.k, slices_of(p.arithmetic), order_beside(p)) + rows_bytes(p.n, weights_of(p));
}

std::string why_not_as_it_lies(const Problem& p) {
  if (!p.is_weight_readable) {
    return p.groups ? "the weights' rows, or the weights, are not whole 16 bytes apart, or x and they are transposed"
                    : "the weight's rows are not whole 16 bytes, or x and the weight are both transposed";
  }
  if (p.k <= kMostCountedColumns) return std::string();
  return text("K = ", p.k, " is above ", kMostCountedColumns, ", the most of which the kernel counts a row's elements");
}

}  // namespace epigemm::fp16_slices
