// The kernels of column statistics (moments.h), callable without CUDA headers. Each function enqueues one kernel, and
// returns nullptr, or what was refused and why. Results are the same bits at every call: all sums have a fixed order.
#pragma once

#include <cstdint>

#include "device/element.h"

namespace epigemm {

constexpr int kMomentRows = 64;  // of a block that block_moments_cuda reduces

// fp64 of fp64, fp32 of all other types.
constexpr int moment_bytes(ElementType element) { return element == ElementType::Float64 ? 8 : 4; }

constexpr int kMomentsOfColumn = 2;  // mean, biased variance

constexpr int64_t moment_blocks(int64_t rows, int height) { return (rows + height - 1) / height; }

// Bytes of BlockMoments [blocks][columns], for blocks of `height` rows.
constexpr int64_t block_moments_bytes(ElementType element, int64_t rows, int64_t columns, int height) {
  return moment_blocks(rows, height) * columns * 2 * moment_bytes(element);
}

// A stored matrix whose rows have no gaps between their elements.
struct MomentMatrix {
  const void* data = nullptr;
  ElementType element = ElementType::Float32;
  int64_t row_stride = 0;  // elements
  int64_t rows = 0, columns = 0;
};

// The most blocks that the kernel behind merges itself (BatchNorm's, csrc/elementwise), in place of a merge that is
// launched: each of its CTAs reads the moments of all blocks in its columns again. Those CTAs are one round of the
// multiprocessors, with 512 bytes of a row each: in 16 bits on 132 multiprocessors 16 blocks are 9 MB of reads from L2.
constexpr int kMostMergedBehind = 16;

// Where a kernel runs. `is_dependent`: the device has programmatic dependent launch.
struct MomentStream {
  int device = 0;
  bool is_dependent = false;
  void* stream = nullptr;  // cudaStream_t
};

// Reduces blocks of kMomentRows rows.
const char* block_moments_cuda(const MomentMatrix& matrix, void* blocks, const MomentStream& on);

// Blocks of `height` rows, to the mean and the biased variance of each column.
struct MomentMerge {
  const void* blocks = nullptr;
  int height = kMomentRows;
  ElementType element = ElementType::Float32;  // of the matrix
  int64_t rows = 0, columns = 0;
  void* moments = nullptr;  // contiguous [kMomentsOfColumn, columns]
};

const char* merge_moments_cuda(const MomentMerge& merge, const MomentStream& on);

}  // namespace epigemm
