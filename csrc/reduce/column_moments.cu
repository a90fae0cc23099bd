#include "reduce/column_moments.h"

#include "device/dependent.cuh"
#include "device/launch.h"
#include "device/types.cuh"
#include "reduce/merge.cuh"

namespace epigemm {
namespace {

using cuda::ComputeType;

constexpr int kWarps = 8, kLanes = 32, kThreads = kWarps * kLanes;
constexpr int kRowsOfWarp = kMomentRows / kWarps;

// --- blocks of rows ----------------------------------------------------------------------------------------------

// `kVector` neighbouring elements of a row.
template <class Element, int kVector>
struct alignas(kVector * sizeof(Element)) Vector {
  Element elements[kVector];
};

// The first `count` elements of a vector; the others are zeros.
template <class Element, int kVector>
__device__ Vector<Element, kVector> load(const Element* from, int64_t count) {
  using Vector = Vector<Element, kVector>;
  if (count >= kVector) return *reinterpret_cast<const Vector*>(from);
  Vector vector;
#pragma unroll
  for (int i = 0; i < kVector; ++i) vector.elements[i] = i < count ? from[i] : Element(0.0f);
  return vector;
}

// The vectors of a warp's rows at `from`: every eighth one, the first `rows` of them. Those of a whole block are loaded
// without a branch between them: behind a branch the compiler waits for what the branch loads, one row at a time.
template <class Element, int kVector>
__device__ void load_rows(Vector<Element, kVector> (&vectors)[kRowsOfWarp], const Element* from, int64_t stride,
                          int rows, int64_t count) {
  if (rows == kRowsOfWarp && count >= kVector) {
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      vectors[i] = *reinterpret_cast<const Vector<Element, kVector>*>(from + i * kWarps * stride);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      if (i < rows) vectors[i] = load<Element, kVector>(from + i * kWarps * stride, count);
    }
  }
}

// A CTA has kMomentRows rows and 32 vectors of columns. Each warp takes every eighth row. All warps have the same
// pivots, those of the block's first row, so that their sums add up.
template <class Element, int kVector>
__global__ void __launch_bounds__(kThreads)
    block_kernel(MomentMatrix matrix, BlockMoments<typename ComputeType<Element>::type>* blocks, unsigned tiles) {
  using Real = typename ComputeType<Element>::type;
  constexpr int kColumns = kLanes * kVector;
  // The number j of each lane's vector. The lines are padded, so that neither lanes nor columns share banks.
  constexpr int kLine = kLanes + kLanes / kVector;
  __shared__ Real sums[kWarps][kVector * kLine], squares[kWarps][kVector * kLine];
  cuda::wait_for_kernel_ahead();
  cuda::let_dependents_start();
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const unsigned block = blockIdx.x / tiles;
  const int64_t first = int64_t(blockIdx.x - block * tiles) * kColumns;
  const int64_t row = int64_t(block) * kMomentRows, column = first + lane * kVector;
  const int rows = static_cast<int>(matrix.rows - row < kMomentRows ? matrix.rows - row : kMomentRows);
  const int rows_of_warp = (rows - warp + kWarps - 1) / kWarps;
  const Element* const begin = static_cast<const Element*>(matrix.data) + row * matrix.row_stride;
  const int64_t count = matrix.columns - column;
  if (count > 0) {
    Vector<Element, kVector> vectors[kRowsOfWarp];
    const Vector<Element, kVector> pivots = load<Element, kVector>(begin + column, count);
    load_rows(vectors, begin + warp * matrix.row_stride + column, matrix.row_stride, rows_of_warp, count);
    PivotSums<Real> columns[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) columns[j].pivot = pivot_of(cuda::to_compute(pivots.elements[j]));
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      if (i >= rows_of_warp) break;
#pragma unroll
      for (int j = 0; j < kVector; ++j) columns[j].add(cuda::to_compute(vectors[i].elements[j]));
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      sums[warp][j * kLine + lane] = columns[j].sum;
      squares[warp][j * kLine + lane] = columns[j].squares;
    }
  }
  __syncthreads();
  const int local = threadIdx.x;
  if (local >= kColumns || first + local >= matrix.columns) return;
  PivotSums<Real> all{pivot_of(cuda::to_compute(begin[first + local]))};
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    all.sum += sums[i][local % kVector * kLine + local / kVector];
    all.squares += squares[i][local % kVector * kLine + local / kVector];
  }
  blocks[block * matrix.columns + first + local] = all.moments(rows);
}

template <class Element, int kVector>
const char* launch_blocks(MomentMatrix matrix, void* blocks, const MomentStream& on) {
  constexpr int kColumns = kLanes * kVector;
  static_assert(kColumns <= kThreads, "a thread finishes one column");
  const int64_t across = (matrix.columns + kColumns - 1) / kColumns;
  const int64_t ctas = across * moment_blocks(matrix.rows, kMomentRows);
  if (ctas > 0x7fffffff) return "the matrix has too many blocks for one launch";
  unsigned tiles = static_cast<unsigned>(across);
  const cuda::LaunchShape shape{dim3(static_cast<unsigned>(ctas)),
                                dim3(kThreads),
                                /*cluster=*/dim3(1),
                                /*shared_bytes=*/0,
                                on.device,
                                on.stream,
                                on.is_dependent};
  void* parameters[] = {&matrix, &blocks, &tiles};
  return cuda::launch<&block_kernel<Element, kVector>>(shape, parameters);
}

// --- merging -----------------------------------------------------------------------------------------------------

struct MergeArguments {
  MomentMerge merge;
  cuda::BlockRows rows;
};

// A CTA has 8 columns, and a thread for each group of their blocks (merge.cuh): eight neighbours fill two sectors, and
// a matrix of a thousand columns has a CTA for every multiprocessor.
constexpr int kMergedColumns = 8, kMergingThreads = kMergedColumns * cuda::kMergeGroups;

template <class Real>
__global__ void __launch_bounds__(kMergingThreads) merge_kernel(const __grid_constant__ MergeArguments p) {
  __shared__ cuda::MergeSums sums[cuda::kMergeGroups][kMergedColumns];
  cuda::wait_for_kernel_ahead();
  cuda::let_dependents_start();
  const MomentMerge& merge = p.merge;
  const int own_column = threadIdx.x % kMergedColumns, group = threadIdx.x / kMergedColumns;
  const int64_t column = int64_t(blockIdx.x) * kMergedColumns + own_column;
  const bool is_inside = column < merge.columns;
  const auto* const blocks = static_cast<const BlockMoments<Real>*>(merge.blocks) + (is_inside ? column : 0);
  const double pivot = pivot_of(blocks->mean);
  cuda::MergeSums own;
#pragma unroll 4
  for (int block = group; block <= p.rows.last; block += cuda::kMergeGroups) {
    own.add(blocks[block * merge.columns], p.rows.of(block), pivot);
  }
  sums[group][own_column] = own;
  cuda::add_groups(sums, group, own_column);
  if (group > 0 || !is_inside) return;
  Real* const to = static_cast<Real*>(merge.moments) + column;
  sums[0][own_column].finish(pivot, merge.rows, to, to + merge.columns);
}

}  // namespace

const char* block_moments_cuda(const MomentMatrix& matrix, void* blocks, const MomentStream& on) {
  if (matrix.rows == 0 || matrix.columns == 0) return nullptr;
  return cuda::with_element_type(matrix.element, [&](auto example) -> const char* {
    using Element = decltype(example);
    constexpr int kVector = 16 / sizeof(Element);
    const bool is_aligned = reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0 && matrix.row_stride % kVector == 0;
    return is_aligned ? launch_blocks<Element, kVector>(matrix, blocks, on)
                      : launch_blocks<Element, 1>(matrix, blocks, on);
  });
}

const char* merge_moments_cuda(const MomentMerge& merge, const MomentStream& on) {
  if (merge.rows == 0 || merge.columns == 0) return nullptr;
  const auto ctas = static_cast<unsigned>((merge.columns + kMergedColumns - 1) / kMergedColumns);
  const cuda::LaunchShape shape{dim3(ctas),          dim3(kMergingThreads),
                                /*cluster=*/dim3(1),
                                /*shared_bytes=*/0,  on.device,
                                on.stream,           on.is_dependent};
  MergeArguments arguments{merge, cuda::BlockRows(merge.rows, merge.height)};
  void* parameters[] = {&arguments};
  return merge.element == ElementType::Float64 ? cuda::launch<&merge_kernel<double>>(shape, parameters)
                                               : cuda::launch<&merge_kernel<float>>(shape, parameters);
}

}  // namespace epigemm
