// The arguments of the planner and the kernels: plain structs, without tensors and CUTLASS types.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "device/element.h"
#include "epilogue/registry.h"
#include "gemm/scales.h"

namespace epigemm {

// The arithmetic of products of fp32 operands, and the sums of 8-bit ones; without meaning for the other element types.
enum class Arithmetic {
  IEEE,      // every product and sum in fp32
  TF32,      // products of 10-bit mantissas on the tensor cores, sums in fp32
  Split,     // fp16x3: three products of two fp16 slices, fp32's accuracy
  Scaled,    // fp16x1: one product of fp16 slices, every row scaled to fp16's range, TF32's mantissas at twice its rate
  Promoted,  // 8 bits: the tensor cores' sums of 128 products are added in fp32
  Fast,      // 8 bits: the tensor cores add all products, with 13 or 14 bits of mantissa
};

constexpr bool is_on_slices(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::Split || arithmetic == Arithmetic::Scaled;
}

// A matrix in memory.
struct Matrix {
  void* data = nullptr;
  ElementType element = ElementType::Float16;
  int64_t row_stride = 0, column_stride = 1;  // elements
};

// Rows of x in groups, each multiplied by a weight of its own: mixtures of experts, and batches, whose groups are
// alike. Groups lie one behind the other; the rows behind the last one are in none, and have no results.
struct Groups {
  const int* ends = nullptr;  // the row behind each group, on the device, if they are not alike
  int64_t count = 0;          // 0: all rows are multiplied by one weight
  int64_t weight_stride = 0;  // elements, from a group's weight to the next one's
  bool are_alike = false;     // all have as many rows

  explicit operator bool() const { return count > 0; }
};

// A product's sizes. A family may decline some of them: none has kernels for more than one product a launch yet.
struct Sizes {
  int64_t m = 0, n = 0, k = 0, batch = 1;

  bool is_empty() const { return m == 0 || n == 0 || k == 0 || batch == 0; }
  bool operator==(const Sizes& other) const {
    return m == other.m && n == other.n && k == other.k && batch == other.batch;
  }
};

// 16-bit matrices that the kernels cannot address. Each call copies them to rows that they can address
// (gemm/planner/copies.h).
struct Copies {
  bool x = false, weight = false, out = false;

  bool any() const { return x || weight || out; }
  bool operator==(const Copies& other) const { return x == other.x && weight == other.weight && out == other.out; }
};

// D = epilogue(x @ weight^T): x is M x K, weight N x K, out (D) M x N. For a pair of products the epilogue's first
// matrix is x @ weight2^T, which is never stored.
struct Problem : Sizes {
  EpilogueId epilogue{};
  Arithmetic arithmetic = Arithmetic::IEEE;
  Matrix x, weight, out;                // each has its own element type
  Scale x_scale, weight_scale;          // in 8 bits; of a pair the first weight's are followed by the second one's
  OutScale out_scale;                   // of an `out` in 8 bits
  Groups groups;                        // the weight is the first group's then, and vectors along N are all groups'
  void* weight2 = nullptr;              // for a pair; like the weight, except for its address
  int alignment = 0;                    // bytes: the largest power of two that divides the address of all of these
  OperandValue operands[kMaxOperands];  // in the epilogue's order, without the accumulator
  bool has_bias = true;                 // counts only where the epilogue has one
  bool are_operands_contiguous = true;  // every per-column vector has stride 1
  bool is_out_padded = false;           // the padding behind the rows of `out` may be written, up to whole 16 bytes
  bool is_pair = false;                 // of products
  Copies copies;
  bool is_packed = false;              // fp16 slices: the weight has a pack
  bool is_weight_readable = false;     // fp16 slices: kernels may read the weight as it lies, in fp32
  bool is_weight_transposed = false;   // K lies across memory
  bool is_tf32_allowed = false;        // fp32: whether PyTorch's GEMM may use TF32
  bool is_batch_invariant = false;     // the plan must not depend on M
  bool is_any_family_offered = false;  // also sm80_mma where calls never choose it, as beside TMA's kernels on Hopper
  void* workspace = nullptr;           // of Family::workspace_bytes bytes
  void* packed_weight = nullptr;       // the weight's pack, if there is one
  bool has_column_moments = false;     // the call also returns statistics of D's columns (csrc/reduce)
  Matrix stored;                       // like out, for the second values of an epilogue that has them
  void* column_blocks = nullptr;       // where a kernel writes moments of D (Family::moment_rows)
  Device device;
  void* stream = nullptr;  // cudaStream_t
};

// For models of 16 bits: a problem with as many bytes and as many instructions of the tensor cores.
inline Problem in_16_bits(const Problem& problem) {
  Problem of_16 = problem;
  of_16.x.element = of_16.weight.element = ElementType::BFloat16;
  of_16.arithmetic = Arithmetic::IEEE;
  of_16.k = (problem.k + 1) / 2;
  return of_16;
}

// The order in which a persistent kernel computes the grid of output tiles.
enum class Raster { AlongM = 0, AlongN = 1 };

// What computes a problem: a family of fused kernels, or the fallback.
enum class FamilyId : int {
#define EPIGEMM_FAMILY(name) name,
#include "gemm/families.def"
#undef EPIGEMM_FAMILY
  fallback,
};

constexpr int kFamilyCount = static_cast<int>(FamilyId::fallback);

// How a problem is computed.
struct Plan {
  FamilyId family = FamilyId::fallback;
  int tile = 0;  // index into the family's tiles for the problem's arithmetic
  Raster raster = Raster::AlongM;
  int swizzle = 1;  // width of the strips of tiles that are computed together, in clusters
  int splits = 1;   // CTAs that share the K of a tile

  bool is_fused() const { return family != FamilyId::fallback; }
};

inline bool operator==(const Plan& a, const Plan& b) {
  return a.family == b.family && a.tile == b.tile && a.raster == b.raster && a.swizzle == b.swizzle &&
         a.splits == b.splits;
}

// A plan and its predicted time.
struct Candidate {
  Plan plan;
  double microseconds = 0;
  bool is_one_kernel = false;  // of the fallback: PyTorch's GEMM is expected to compute the whole epilogue
};

}  // namespace epigemm
