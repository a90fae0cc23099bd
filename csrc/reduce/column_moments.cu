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

// A CTA has kMomentRows rows and 32 vectors of columns. Each warp takes every eighth row. All warps have the same
// pivots, those of the block's first row, so that their sums add up.
template <class Element, int kVector>
__global__ void __launch_bounds__(kThreads)
    block_kernel(MomentMatrix matrix, BlockMoments<typename ComputeType<Element>::type>* blocks, int64_t tiles) {
  using Real = typename ComputeType<Element>::type;
  constexpr int kColumns = kLanes * kVector;
  __shared__ Real sums[kWarps][kColumns], squares[kWarps][kColumns];
  cuda::wait_for_kernel_ahead();
  cuda::let_dependents_start();
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t block = blockIdx.x / tiles, first = (blockIdx.x - block * tiles) * kColumns;
  const int64_t row = block * kMomentRows, column = first + lane * kVector;
  const int rows = static_cast<int>(matrix.rows - row < kMomentRows ? matrix.rows - row : kMomentRows);
  const Element* const begin = static_cast<const Element*>(matrix.data) + row * matrix.row_stride;
  const int64_t count = matrix.columns - column;
  if (count > 0) {
    Vector<Element, kVector> vectors[kRowsOfWarp];
    const Vector<Element, kVector> pivots = load<Element, kVector>(begin + column, count);
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      const int at = i * kWarps + warp;
      if (at < rows) vectors[i] = load<Element, kVector>(begin + at * matrix.row_stride + column, count);
    }
    PivotSums<Real> columns[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) columns[j].pivot = pivot_of(cuda::to_compute(pivots.elements[j]));
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      if (i * kWarps + warp >= rows) break;
#pragma unroll
      for (int j = 0; j < kVector; ++j) columns[j].add(cuda::to_compute(vectors[i].elements[j]));
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      sums[warp][lane * kVector + j] = columns[j].sum;
      squares[warp][lane * kVector + j] = columns[j].squares;
    }
  }
  __syncthreads();
  const int local = threadIdx.x;
  if (local >= kColumns || first + local >= matrix.columns) return;
  PivotSums<Real> all{pivot_of(cuda::to_compute(begin[first + local]))};
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    all.sum += sums[i][local];
    all.squares += squares[i][local];
  }
  blocks[block * matrix.columns + first + local] = all.moments(rows);
}

template <class Element, int kVector>
const char* launch_blocks(MomentMatrix matrix, void* blocks, const MomentStream& on) {
  constexpr int kColumns = kLanes * kVector;
  static_assert(kColumns <= kThreads, "a thread finishes one column");
  int64_t tiles = (matrix.columns + kColumns - 1) / kColumns;
  const int64_t ctas = tiles * moment_blocks(matrix.rows, kMomentRows);
  if (ctas > 0x7fffffff) return "the matrix has too many blocks for one launch";
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
  int64_t blocks;
};

// A CTA has 32 columns, and a warp for each group of blocks (merge.cuh).
template <class Real>
__global__ void __launch_bounds__(kLanes* cuda::kMergeGroups) merge_kernel(MergeArguments arguments) {
  __shared__ cuda::MergeSums sums[cuda::kMergeGroups][kLanes];
  cuda::wait_for_kernel_ahead();
  cuda::let_dependents_start();
  const MomentMerge& merge = arguments.merge;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int64_t column = int64_t(blockIdx.x) * kLanes + lane;
  const bool is_inside = column < merge.columns;
  const auto* const blocks = static_cast<const BlockMoments<Real>*>(merge.blocks) + (is_inside ? column : 0);
  const double pivot = pivot_of(blocks->mean);
  cuda::MergeSums own;
#pragma unroll 4
  for (int64_t i = group; i < arguments.blocks; i += cuda::kMergeGroups) {
    own.add(blocks[i * merge.columns], cuda::rows_of_block(merge.rows, merge.height, i), pivot);
  }
  sums[group][lane] = own;
  cuda::add_groups(sums, group, lane);
  if (group > 0 || !is_inside) return;
  sums[0][lane].finish(pivot, merge.rows, static_cast<Real*>(merge.mean) + column,
                       static_cast<Real*>(merge.variance) + column);
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
  const auto ctas = static_cast<unsigned>((merge.columns + kLanes - 1) / kLanes);
  const cuda::LaunchShape shape{dim3(ctas),          dim3(kLanes * cuda::kMergeGroups),
                                /*cluster=*/dim3(1),
                                /*shared_bytes=*/0,  on.device,
                                on.stream,           on.is_dependent};
  MergeArguments arguments{merge, moment_blocks(merge.rows, merge.height)};
  void* parameters[] = {&arguments};
  return merge.element == ElementType::Float64 ? cuda::launch<&merge_kernel<double>>(shape, parameters)
                                               : cuda::launch<&merge_kernel<float>>(shape, parameters);
}

}  // namespace epigemm
