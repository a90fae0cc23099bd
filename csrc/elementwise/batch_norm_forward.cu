#include "device/dependent.cuh"
#include "elementwise/batch_norm.cuh"
#include "reduce/merge.cuh"

namespace epigemm {
namespace cuda::bands {
namespace {

__device__ __forceinline__ void count_batch(const BatchNormForward& p) {
  if (p.counted && blockIdx.x == 0 && threadIdx.x == 0) ++*p.counted;
}

template <class Compute>
__device__ void update_running(const BatchNormForward& p, int64_t column, const NormColumn<Compute>& of) {
  const auto rows = static_cast<Compute>(p.rows);
  const auto factor = static_cast<Compute>(p.tracked ? 1.0 / static_cast<double>(*p.tracked) : p.momentum);
  const auto follow = [&](const WrittenVector& running, Compute value) {
    if (!running.data) return;
    const auto before = load<Compute>(FoldVector{running.data, running.stride, running.element}, column, 0);
    store(running, column, fma(factor, value, (1 - factor) * before));
  };
  follow(p.running_mean, of.scale * of.mean);
  follow(p.running_variance, of.scale * of.scale * of.variance * (rows / (rows - 1)));
}

// The vectors of a band, in shared memory.
template <class Compute, int Size>
struct Band {
  alignas(16) Compute mean[kBand<Size>], slope[kBand<Size>], beta[kBand<Size>];

  __device__ void set(int i, const NormColumn<Compute>& of) {
    mean[i] = of.mean;
    slope[i] = of.slope;
    beta[i] = of.beta;
  }
};

// Writes y in a CTA's rows, of which the first are in `u`.
template <int Warps, class Element, int Size>
__device__ __forceinline__ void normalise(const BatchNormForward& p, const Band<ComputeOf<Element>, Size>& band,
                                          Batches<Warps> rows, Pack<Element, Size> (&u)[kAtOnce]) {
  using Compute = ComputeOf<Element>;
  Compute mean[Size], slope[Size], beta[Size];
  read_shared(band.mean, mean);
  read_shared(band.slope, slope);
  read_shared(band.beta, beta);
  while (rows.has(0)) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (!rows.has(i)) break;
      Compute values[Size];
      to_compute(u[i], values);
#pragma unroll
      for (int j = 0; j < Size; ++j) {
        const Compute y = fma(values[j] - mean[j], slope[j], beta[j]);
        values[j] = p.relu && y <= 0 ? Compute(0) : y;
      }
      store_row(static_cast<Element*>(p.y), rows.offset_of(i), from_compute<Element>(values));
    }
    rows.advance();
    rows.load(static_cast<const Element*>(p.u), u);
  }
}

// All kernels that write a matrix load their first rows before they compute the columns' values, which takes as long as
// the loads. The bounds keep 64 KB of loads or more in flight on a multiprocessor: 16 bytes of 4 rows of each thread
// here, of 8 in the backward pass.
template <class Element, int Size>
__global__ void __launch_bounds__(kThreads, 4)
    forward_kernel(const __grid_constant__ BatchNormForward p, int64_t rows_of_cta) {
  using Compute = ComputeOf<Element>;
  __shared__ Band<Compute, Size> band;
  const Place place = place_of(p.rows, p.columns, kBand<Size>, rows_of_cta);
  const Batches<kWarps> rows(place, p.columns, Size);
  count_batch(p);
  Pack<Element, Size> u[kAtOnce];
  rows.load(static_cast<const Element*>(p.u), u);
  const int own = static_cast<int>(threadIdx.x);
  if (const int64_t column = place.first_column + own; own < kBand<Size> && column < p.columns) {
    const NormColumn<Compute> of(p, column);
    band.set(own, of);
    if (place.first_row == 0) update_running(p, column, of);
  }
  __syncthreads();
  normalise(p, band, rows, u);
}

// --- with the merge of the blocks' moments ---------------------------------------------------------------------------

// Few CTAs, of many rows each: every one of them merges the moments of its columns.
constexpr int kMergingWarps = 16, kMergingThreads = kLanes * kMergingWarps, kMergingCtas = 2;  // of a multiprocessor

struct MergingForward : BatchNormForward {
  BlockRows block_rows;
};

// Of the CTAs with the same columns the first one writes what the columns have one of.
template <class Element, int Size>
__global__ void __launch_bounds__(kMergingThreads, kMergingCtas)
    merging_kernel(const __grid_constant__ MergingForward p, int64_t rows_of_cta) {
  using Compute = ComputeOf<Element>;
  constexpr int kColumns = kBand<Size>, kParts = kMergingThreads / kColumns;  // threads of a column
  __shared__ Band<Compute, Size> band;
  __shared__ MergeSums sums[kParts][kColumns];
  wait_for_kernel_ahead();
  let_dependents_start();
  const Place place = place_of(p.rows, p.columns, kColumns, rows_of_cta);
  const Batches<kMergingWarps> rows(place, p.columns, Size);
  count_batch(p);
  Pack<Element, Size> u[kAtOnce];
  rows.load(static_cast<const Element*>(p.u), u);
  const int own = static_cast<int>(threadIdx.x) % kColumns, part = static_cast<int>(threadIdx.x) / kColumns;
  const int64_t column = place.first_column + own;
  const bool is_inside = column < p.columns;
  const auto* const blocks = static_cast<const BlockMoments<Compute>*>(p.blocks) + (is_inside ? column : 0);
  const PartOfBlocks<kParts, Compute> of_part(p.block_rows, blocks, p.columns, part);
  sums[part][own] = of_part.sums();
  add_groups(sums, part, own);
  if (part == 0 && is_inside) {
    Compute mean, variance;
    sums[0][own].finish(of_part.pivot, p.rows, &mean, &variance);
    const NormColumn<Compute> of(p, column, mean, variance);
    band.set(own, of);
    if (place.first_row == 0) {
      static_cast<Compute*>(p.merged_mean)[column] = mean;
      static_cast<Compute*>(p.merged_variance)[column] = variance;
      update_running(p, column, of);
    }
  }
  __syncthreads();
  normalise(p, band, rows, u);
}

// As many rows as make the CTAs one round of the multiprocessors. More than 256 are not needed for the moments' bytes
// to be few beside theirs.
int64_t rows_of_a_round(const BatchNorm& p, int64_t bands) {
  constexpr int64_t kBatch = kAtOnce * kMergingWarps, kMostRows = 256;
  const int64_t chunks = std::max<int64_t>(kMergingCtas * device(p.device).multiprocessors / bands, 1);
  return std::min(kBatch * divided_up(p.rows, chunks * kBatch), kMostRows);
}

template <class Element, int Size>
const char* launch_forward(const BatchNormForward& p) {
  constexpr int kDependentCapability = 90;
  const int64_t bands = divided_up(p.columns, kBand<Size>);
  if (!p.blocks) {
    const int64_t rows = rows_of_a_pass(p, bands);
    return launch<&forward_kernel<Element, Size>, kWarps>(p, bands * divided_up(p.rows, rows), rows);
  }
  const int64_t rows = rows_of_a_round(p, bands);
  const MergingForward merging{p, BlockRows(p.rows, p.block_rows)};
  const bool is_dependent = device(p.device).capability >= kDependentCapability;
  return launch<&merging_kernel<Element, Size>, kMergingWarps>(merging, bands * divided_up(p.rows, rows), rows,
                                                               is_dependent);
}

}  // namespace
}  // namespace cuda::bands

const char* batch_norm_forward_cuda(const BatchNormForward& problem) {
  using namespace cuda::bands;
  return with_access(problem, aligned(problem.y),
                     [&](auto element, auto size) { return launch_forward<decltype(element), size.value>(problem); });
}

}  // namespace epigemm
