// The swap-AB kernel: D = epilogue(x @ weight^T) for products that give the large tiles too little to do, because M is
// small (the weight's bytes are what takes the time) or because the output has few tiles and K is long.
//
// - Operands swapped: the tensor cores' 64 rows are the weight's, their 16 to 128 columns are x's rows. A small M fills
//   a narrow one instead of leaving a tall one empty.
// - K is split over the CTAs of a cluster, so that all multiprocessors load. Each CTA leaves its sums in its shared
//   memory, and each reduces a part of the tile over the cluster, in the order of K: the same bits every time, no
//   workspace, no second kernel, and the epilogue is applied once.
// - One warp loads (TMA, a ring of stages), one or two warpgroups multiply.
#pragma once

#include <cuda.h>

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/grid_dependency_control.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "device/types.cuh"
#include "gemm/sm90_swap_ab/tiles.h"
#include "open/epilogue.cuh"

namespace epigemm::sm90_swap_ab {

constexpr int kVector = 4;  // neighbouring columns of D for which one thread computes the epilogue
constexpr int kSegment =
    32 * kVector;  // results of one warp: of one row, or of two rows of a tile that is half as wide

// The element as torch stores it, and as the tensor cores multiply it.
template <class Stored>
struct Multiplied;
template <>
struct Multiplied<__half> {
  using Type = cutlass::half_t;
};
template <>
struct Multiplied<__nv_bfloat16> {
  using Type = cutlass::bfloat16_t;
};
template <>
struct Multiplied<float> {
  using Type = cutlass::tfloat32_t;  // TMA drops the low 13 mantissa bits
};

// Hardware barriers of a CTA; __syncthreads has number 0.
constexpr uint32_t kPrepared = 1;    // the rings' barriers are initialised
constexpr uint32_t kStagesRead = 2;  // the multiplying warps have read the last stage

struct Arguments {
  void* out;
  int64_t out_row_stride;
  int m, n;
  int steps;  // stages of K, over all CTAs of a cluster
  open::Operands<float> operands;
  void* stored;  // for the functor's second values, like `out`; last, because few kernels write it
  int64_t stored_row_stride;
};

template <class Stored_, int TileIndex>
struct Config {
  using Stored = Stored_;
  using Element = typename Multiplied<Stored>::Type;
  static constexpr Tile tile = kTiles[TileIndex];
  static constexpr int kWarpgroups = tile.n > 64 ? 2 : 1;
  static constexpr int kConsumerThreads = 128 * kWarpgroups;
  static constexpr int kThreads = kConsumerThreads + 32;  // plus the warp that loads
  static constexpr int kTileK = kTileKBytes / static_cast<int>(sizeof(Element));

  // The kernel's rows are the weight's.
  using TileShape = cute::Shape<cute::Int<tile.n>, cute::Int<tile.m>, cute::Int<kTileK>>;
  using TiledMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, TileShape, cute::GMMA::Major::K, cute::GMMA::Major::K>(),
      cute::Layout<cute::Shape<cute::Int<kWarpgroups>, cute::_1, cute::_1>>{}));

  template <int Rows>
  using SmemLayout =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                   cute::Shape<cute::Int<Rows>, cute::Int<kTileK>, cute::Int<tile.stages>>{}));
  using SmemLayoutWeight = SmemLayout<tile.n>;
  using SmemLayoutX = SmemLayout<tile.m>;

  static constexpr uint32_t kStageBytes = kTileKBytes * (tile.m + tile.n);

  // A column of sums starts four banks after the one before it: a warpgroup writes them without conflicts.
  static constexpr int kSumsStride = tile.n + 4;

  struct alignas(1024) Shared {
    union {
      struct {
        cute::array_aligned<Element, cute::cosize_v<SmemLayoutWeight>, 1024> weight;
        cute::array_aligned<Element, cute::cosize_v<SmemLayoutX>, 1024> x;
      } stages;
      float sums[tile.m * kSumsStride];  // used when the last stage has been read
    };
    cutlass::arch::ClusterTransactionBarrier full[tile.stages];
    cutlass::arch::ClusterBarrier empty[tile.stages];
  };
  // 228 KB a multiprocessor, of which the system takes 1 KB a CTA.
  static_assert((sizeof(Shared) + 1024) * tile.ctas_per_multiprocessor <= 228 * 1024, "does not fit");
};

// The position in the ring of stages.
template <int Stages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// --- loading -------------------------------------------------------------------------------------------------------

template <class Config>
__device__ __forceinline__ void prepare(typename Config::Shared& shared) {
  for (int stage = 0; stage < Config::tile.stages; ++stage) {
    shared.full[stage].init(1);
    shared.empty[stage].init(Config::kWarpgroups);
  }
  cutlass::arch::fence_barrier_init();
  cutlass::arch::fence_view_async_shared();  // the barriers must be visible to this thread's loads
}

template <class Config>
__device__ __forceinline__ void load(CUtensorMap const& weight_map, CUtensorMap const& x_map,
                                     typename Config::Shared& shared, int first, int end, int m0, int n0) {
  using cute::SM90_TMA_LOAD_2D;
  constexpr auto kNoHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  RingPosition<Config::tile.stages> position;
  for (int step = first; step < end; ++step, position.advance()) {
    const int stage = position.stage;
    shared.empty[stage].wait(position.phase ^ 1);
    shared.full[stage].arrive_and_expect_tx(Config::kStageBytes);
    auto* const barrier = reinterpret_cast<uint64_t*>(&shared.full[stage]);
    const int k = step * Config::kTileK;
    SM90_TMA_LOAD_2D::copy(&weight_map, barrier, kNoHint,
                           shared.stages.weight.data() + stage * Config::tile.n * Config::kTileK, k, n0);
    SM90_TMA_LOAD_2D::copy(&x_map, barrier, kNoHint, shared.stages.x.data() + stage * Config::tile.m * Config::kTileK,
                           k, m0);
  }
}

// --- multiplying ---------------------------------------------------------------------------------------------------

// Computes the sums of this CTA's part of K, and leaves them in its shared memory.
template <class Config>
__device__ __forceinline__ void multiply(typename Config::Shared& shared, int count) {
  using namespace cute;
  const int thread = threadIdx.x;
  typename Config::TiledMma mma;
  auto const thread_mma = mma.get_slice(thread);
  Tensor weight = thread_mma.make_fragment_A(thread_mma.partition_A(
      make_tensor(make_smem_ptr(shared.stages.weight.data()), typename Config::SmemLayoutWeight{})));
  Tensor x = thread_mma.make_fragment_B(
      thread_mma.partition_B(make_tensor(make_smem_ptr(shared.stages.x.data()), typename Config::SmemLayoutX{})));
  constexpr auto kSumsShape = select<0, 1>(typename Config::TileShape{});
  Tensor sums = partition_fragment_C(mma, kSumsShape);

  RingPosition<Config::tile.stages> position;
  int previous = 0;
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  for (int i = 0; i < count; ++i, position.advance()) {
    const int stage = position.stage;
    shared.full[stage].wait(position.phase);
    warpgroup_fence_operand(sums);
    warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < size<2>(weight); ++k) {
      gemm(mma, weight(_, _, k, stage), x(_, _, k, stage), sums);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    warpgroup_wait<1>();  // the batch before this one has read its stage
    if (i > 0 && thread % 128 == 0) shared.empty[previous].arrive();
    previous = stage;
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(sums);

  cutlass::arch::NamedBarrier::sync(Config::kConsumerThreads, kStagesRead);  // all stages have been read
  Tensor places = thread_mma.partition_C(make_identity_tensor(kSumsShape));
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(sums); ++i) {
    shared.sums[get<1>(places(i)) * Config::kSumsStride + get<0>(places(i))] = sums(i);
  }
}

// --- finishing -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float4 load_from_cta(const float* here, int rank) {
  const uint32_t address = cute::set_block_rank(cute::cast_smem_ptr_to_uint(here), rank);
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address));
  return value;
}

// Adds over the cluster, in the order of K.
template <int Splits>
__device__ __forceinline__ float4 sum_up(const float4 (&parts)[Splits]) {
  float4 sum = parts[0];
#pragma unroll
  for (int rank = 1; rank < Splits; ++rank) {
    sum.x += parts[rank].x;
    sum.y += parts[rank].y;
    sum.z += parts[rank].z;
    sum.w += parts[rank].w;
  }
  return sum;
}

// Addresses and lengths of D's rows are multiples of 16 bytes, so a vector is in D as a whole, or not at all.
template <class Value, class Epilogue, class Stored>
__device__ __forceinline__ void store(Stored* out, float4 z, const Epilogue& epilogue,
                                      const typename Epilogue::Row& row) {
  const float sums[kVector] = {z.x, z.y, z.z, z.w};
  float results[kVector];
  epilogue.template apply<Value>(sums, row, results);
  struct alignas(sizeof(Stored) * kVector) {
    Stored elements[kVector];
  } vector;
#pragma unroll
  for (int i = 0; i < kVector; i += 2) cuda::from_compute_pair<Stored>(results + i, vector.elements + i);
  *reinterpret_cast<decltype(vector)*>(out) = vector;
}

// The part of the tile for which a thread computes the epilogue: segments of 128 results, distributed over the warps of
// all CTAs. A thread's results are all in the same columns.
template <class Config>
struct Share {
  static constexpr int kAcross = Config::tile.n > kSegment ? Config::tile.n / kSegment : 1;
  static constexpr int kRows = Config::tile.n < kSegment ? kSegment / Config::tile.n : 1;
  static constexpr int kLanes = 32 / kRows;  // of one row
  // A warp's, where the tile is one CTA's alone.
  static constexpr int kMostSegments = Config::tile.m * Config::tile.n / kSegment / (Config::kConsumerThreads / 32);
  int first, step, lane;

  __device__ __forceinline__ Share(int rank, int splits)
      : first(static_cast<int>(threadIdx.x) / 32 * splits + rank),
        step(Config::kConsumerThreads / 32 * splits),
        lane(static_cast<int>(threadIdx.x) % 32) {}
  __device__ __forceinline__ int column() const { return first % kAcross * kSegment + lane % kLanes * kVector; }
  __device__ __forceinline__ int row(int segment) const { return segment / kAcross * kRows + lane / kLanes; }
};

// Eight loads at a time, because shared memory of another CTA has a long latency. If there are operands by rows, fewer,
// because these need registers.
template <int Splits, class Epilogue, class Config>
__device__ __forceinline__ void finish(const Arguments& p, const typename Config::Shared& shared,
                                       const Share<Config>& share, const Epilogue& epilogue, int m0, int n0) {
  using Stored = typename Config::Stored;
  constexpr int kThere = std::max(1, Share<Config>::kMostSegments / Splits);
  constexpr int kAtOnce = std::min(kMostSplits / Splits, kThere);
  const int column = share.column();
  if (n0 + column >= p.n) return;
  const int rows = min(p.m - m0, Config::tile.m);
  for (int segment = share.first; share.row(segment) < rows; segment += kAtOnce * share.step) {
    float4 parts[kAtOnce][Splits];
    typename Epilogue::Row of_rows[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = share.row(segment + i * share.step);
      if (row >= rows) break;
      of_rows[i] = epilogue.row(m0 + row);
#pragma unroll
      for (int rank = 0; rank < Splits; ++rank) {
        parts[i][rank] = load_from_cta(shared.sums + row * Config::kSumsStride + column, rank);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = share.row(segment + i * share.step);
      if (row >= rows) break;
      const float4 sum = sum_up(parts[i]);
      Stored* const out = static_cast<Stored*>(p.out) + (m0 + row) * p.out_row_stride + n0 + column;
      store<open::Result>(out, sum, epilogue, of_rows[i]);
      if (epigemm_has_store()) {
        Stored* const beside = static_cast<Stored*>(p.stored) + (m0 + row) * p.stored_row_stride + n0 + column;
        store<open::Stored>(beside, sum, epilogue, of_rows[i]);
      }
    }
  }
}

// --- the kernel ----------------------------------------------------------------------------------------------------

// The epilogue's operands of a thread's rows, which are loaded while the sums are computed.
template <class Epilogue, class Config>
__device__ __forceinline__ void prefetch(const Arguments& p, const Share<Config>& share, const Epilogue& epilogue,
                                         int m0, int n0) {
  if (n0 + share.column() >= p.n) return;
  const int rows = min(p.m - m0, Config::tile.m);
#pragma unroll 1
  for (int segment = share.first; share.row(segment) < rows; segment += share.step) {
    epilogue.prefetch(m0 + share.row(segment));
  }
}

// Grid: (CTAs of the cluster, tiles along M, tiles along N).
template <class Epilogue, class Config>
__device__ __forceinline__ void run(CUtensorMap const& weight_map, CUtensorMap const& x_map, const Arguments& p) {
  using cutlass::arch::NamedBarrier;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<typename Config::Shared*>(memory);
  const int splits = gridDim.x, rank = blockIdx.x;
  const int m0 = blockIdx.y * Config::tile.m, n0 = blockIdx.z * Config::tile.n;
  const int first = rank * p.steps / splits, end = (rank + 1) * p.steps / splits;

  if (threadIdx.x >= Config::kConsumerThreads) {
    const bool loads = threadIdx.x == Config::kConsumerThreads;
    if (loads) {
      cute::prefetch_tma_descriptor(&weight_map);
      cute::prefetch_tma_descriptor(&x_map);
      prepare<Config>(shared);
    }
    __syncwarp();
    NamedBarrier::arrive(Config::kThreads, kPrepared);
    cutlass::arch::wait_on_dependent_grids();
    if (loads) load<Config>(weight_map, x_map, shared, first, end, m0, n0);
    __syncwarp();
    cutlass::arch::launch_dependent_grids();
    cute::cluster_sync();
  } else {
    const Share<Config> share(rank, splits);
    NamedBarrier::sync(Config::kThreads, kPrepared);
    cutlass::arch::wait_on_dependent_grids();
    // Made here, while the loads are running.
    const Epilogue epilogue(p.operands, n0 + share.column(), p.n);
    prefetch<Epilogue, Config>(p, share, epilogue, m0, n0);
    multiply<Config>(shared, end - first);
    cute::cluster_sync();
    switch (splits) {
      case 1:
        finish<1>(p, shared, share, epilogue, m0, n0);
        break;
      case 2:
        finish<2>(p, shared, share, epilogue, m0, n0);
        break;
      case 4:
        finish<4>(p, shared, share, epilogue, m0, n0);
        break;
      default:
        finish<8>(p, shared, share, epilogue, m0, n0);
    }
  }
  // No CTA may end while another one may still read its sums.
  if (splits > 1) cute::cluster_sync();
}

}  // namespace epigemm::sm90_swap_ab
