// From the moments of blocks of rows to those of a column. What is added is the same in every kernel, and so is the
// order: group g of kMergeGroups has the blocks g, g + kMergeGroups, ..., and a tree adds group g + half to group g,
// for half = kMergeGroups / 2, ..., 1. A group without a block adds nothing. So all kernels compute the same bits.
// Products are added by fma() alone: the compiler could contract other sums differently in each kernel.
#pragma once

#include "reduce/column_moments.h"
#include "reduce/moments.h"

namespace epigemm::cuda {

constexpr int kMergeGroups = 32;

// Of the blocks' deviations from the first block's mean, the pivot if it is finite (pivot_of).
struct MergeSums {
  double sum = 0, squares = 0;

  // `rows`: of the block.
  template <class Real>
  __device__ __forceinline__ void add(const BlockMoments<Real>& block, double rows, double pivot) {
    const double deviation = block.mean - pivot;
    sum = fma(rows, deviation, sum);
    squares += fma(rows * deviation, deviation, static_cast<double>(block.squares));
  }

  __device__ __forceinline__ void add(const MergeSums& other) {
    sum += other.sum;
    squares += other.squares;
  }

  // The column's mean and biased variance.
  template <class Real>
  __device__ __forceinline__ void finish(double pivot, int64_t rows, Real* mean, Real* variance) const {
    const double shift = sum / static_cast<double>(rows);
    const double found = fma(-shift, shift, squares / static_cast<double>(rows));
    *mean = static_cast<Real>(pivot + shift);
    *variance = static_cast<Real>(found < 0 ? 0.0 : found);  // NaN stays
  }
};

// The rows of the blocks of a matrix. As a kernel's parameter the numbers take no registers.
struct BlockRows {
  int last;             // block
  double height, left;  // rows of a block, and of the last one

  BlockRows(int64_t rows, int height)
      : last(static_cast<int>(moment_blocks(rows, height)) - 1),
        height(height),
        left(static_cast<double>(rows - int64_t(last) * height)) {}

  __device__ __forceinline__ double of(int block) const { return block < last ? height : left; }
};

// The tree's part from `half` = Groups / 2 on, in shared memory: sums[group][lane]. All threads of the CTA call it.
template <int Groups, int Lanes>
__device__ __forceinline__ void add_groups(MergeSums (&sums)[Groups][Lanes], int group, int lane) {
#pragma unroll
  for (int half = Groups / 2; half > 0; half /= 2) {
    __syncthreads();
    if (group < half) sums[group][lane].add(sums[group + half][lane]);
  }
}

static_assert(kMostMergedBehind == kMergeGroups / 2, "the tree's first step finds no group in its upper half");

// Of at most kMostMergedBehind blocks, those of a column that belong to group `part`, if the column has `Parts`
// threads: the tree up to where `Parts` groups are left. The rest is add_groups'.
template <int Parts, class Real>
struct PartOfBlocks {
  static constexpr int kCount = kMostMergedBehind / Parts;
  const BlockRows& all;
  int part;
  double pivot;
  BlockMoments<Real> loaded[kCount];

  // Issues all loads; `moments`: of the column.
  __device__ __forceinline__ PartOfBlocks(const BlockRows& all, const BlockMoments<Real>* moments, int64_t columns,
                                          int part)
      : all(all), part(part), pivot(pivot_of(moments->mean)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (block_of(i) <= all.last) loaded[i] = moments[block_of(i) * columns];
    }
  }

  // The groups First, First + Step, ... of the part. A subtree is added before the next one, which takes few registers.
  template <int First = 0, int Step = 1>
  __device__ __forceinline__ MergeSums sums() const {
    MergeSums found;
    if constexpr (Step == kCount) {
      const int block = block_of(First);
      if (block <= all.last) found.add(loaded[First], all.of(block), pivot);
    } else {
      found = sums<First, 2 * Step>();
      found.add(sums<First + Step, 2 * Step>());
    }
    return found;
  }

 private:
  __device__ __forceinline__ int block_of(int i) const { return part + i * Parts; }
};

}  // namespace epigemm::cuda
