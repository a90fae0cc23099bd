// The mainloop of 8-bit products whose sums are promoted: the tensor cores, which keep 13 or 14 bits of a sum, add 128
// products of each, and these sums are added to a second accumulator in fp32, times the scales of their blocks if there
// are any.
#pragma once

#include "gemm/scales.h"
#include "gemm/sm90/kernel.cuh"
#include "gemm/sm90_tma/shared_k_mainloop.h"

namespace epigemm::sm90_tma {

constexpr int kPromoted = 128;  // of K

// What sums of 128 products are multiplied by: nothing.
struct NoFactors {
  static constexpr bool kAreThere = false;
};

// The scale of a row of x times the one of 128 rows of the weight, for the K of a stage. Lanes with the same rows of x,
// which are four, or eight of a transposed tile, read the scales of as many stages at once, and hand them to each
// other: so each is read once by a warp, and long before it is used.
//
// Columns: of a tile as the kernel has them, of both weights of a pair.
template <int Columns, int Weights, bool IsTransposed>
class BlockFactors {
 public:
  static constexpr bool kAreThere = true;
  // Blocks of the weights in a tile, and the first column of the second one.
  static constexpr int kBlocks = IsTransposed || (Weights == 1 && kPromoted % Columns == 0) ? 1 : 2;
  static constexpr int kAtOnce = IsTransposed ? 8 : 4;          // stages
  static constexpr int kRows = IsTransposed ? Columns / 4 : 2;  // of x, of a thread
  static_assert(IsTransposed || Weights == 2 || kBlocks == 1 || Columns == 192, "where does the second block begin?");

  struct Params {
    Scale x, weight;
    int rows, columns;  // of x, and of a weight
  };
  float now[kRows][kBlocks];  // of a stage

  // `first`: stage of K.
  CUTLASS_DEVICE void begin(Params const& params, sm90::Place place, int first, int stages) {
    params_ = &params, place_ = place;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
    const int own =
        min(IsTransposed ? lane / 4 : lane % 4, stages - 1);  // the first stage whose scales this lane reads
    left_ = stages - own;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int row =
          IsTransposed ? place.column + i / 2 * 8 + lane % 4 * 2 + i % 2 : place.row + warp * 16 + lane / 4 + i * 8;
      x_at_[i] = static_cast<uint32_t>(min(row, params.rows - 1) * params.x.row_stride +
                                       (first + own) * params.x.block_stride);
    }
    const int blocks = cute::ceil_div(params.columns, cute::Int<kPromoted>{});
    const int first_block = (IsTransposed ? place.row : place.column) / kPromoted;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kBlocks; ++j) {
      // A tile's last rows or columns may be outside.
      const int block = Weights == 2 ? min(first_block, blocks - 1) + j * blocks : min(first_block + j, blocks - 1);
      weight_at_[j] =
          static_cast<uint32_t>(block * params.weight.row_stride + (first + own) * params.weight.block_stride);
    }
    load();
  }

  // The column of the tile where the second block of weights begins.
  CUTLASS_DEVICE int boundary() const { return Weights == 2 ? Columns / 2 : kPromoted - place_.column % kPromoted; }

  // To be called for one stage after another.
  CUTLASS_DEVICE void take(int stage) {
    const int turn = stage % kAtOnce;
    if (turn == 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kBlocks; ++j) held_[i][j] = of_x_[i] * of_weight_[j];
      }
      load();
    }
    const int lane = static_cast<int>(threadIdx.x) % 32,
              from = IsTransposed ? turn * 4 + lane % 4 : lane / 4 * 4 + turn;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kBlocks; ++j) now[i][j] = __shfl_sync(~0u, held_[i][j], from);
    }
  }

 private:
  // Always, if need be the last ones again: a result of a condition would be moved, which waits for the load.
  CUTLASS_DEVICE void load() {
    Params const& p = *params_;
    const int64_t stages = left_ > kAtOnce ? kAtOnce : 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      of_x_[i] = p.x.data[x_at_[i]];
      x_at_[i] += static_cast<uint32_t>(stages * p.x.block_stride);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kBlocks; ++j) {
      of_weight_[j] = p.weight.data[weight_at_[j]];
      weight_at_[j] += static_cast<uint32_t>(stages * p.weight.block_stride);
    }
    left_ -= kAtOnce;
  }

  Params const* params_;
  sm90::Place place_;
  int left_;                                   // stages
  uint32_t x_at_[kRows], weight_at_[kBlocks];  // of the next scales, which are fewer than 2^32 (call/prepare.cpp)
  float of_x_[kRows], of_weight_[kBlocks];     // of a later stage, one for each lane that has the same rows
  float held_[kRows][kBlocks];                 // the same of this stage or a neighbour
};

// The parameters of a mainloop with factors.
template <class Params, class Factors>
struct WithFactors : Params {
  using Params::operator=;
  typename Factors::Params factors;
};

// Base: CUTLASS's mainloop. Tiles are cooperative or single: a warpgroup's additions run under the other one's
// products.
template <class Base, class Factors = NoFactors, bool SharesK = false>
struct PromotedMainloop : Base {
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using MainloopPipeline = PipelineOf<Base, SharesK>;
  using Params =
      std::conditional_t<Factors::kAreThere, WithFactors<typename Base::Params, Factors>, typename Base::Params>;
  static_assert(cute::get<2>(typename Base::TileShape{}) == kPromoted, "a stage is promoted as a whole");

  sm90::Place place{};
  int first{};

  // `first_stage`: of those that this CTA multiplies.
  CUTLASS_DEVICE void take_place(sm90::Place of_tile, int first_stage) { place = of_tile, first = first_stage; }

  template <class Sums>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Sums& sums, int stages, int thread,
                          TensorStorage& shared, Params const& params) {
    using namespace cute;
    typename Base::TiledMma mma;
    const int warpgroup = __shfl_sync(~0u, thread / 128, 0);
    Tensor const a = operand_a<Base>(shared, warpgroup);
    Tensor const b = operand_b<Base>(shared, warpgroup);
    Tensor part = make_fragment_like(sums);
    constexpr int kMmas = size<2>(decltype(a){});
    Factors factors;
    if constexpr (Factors::kAreThere) factors.begin(params.factors, place, first, stages);
    clear(sums);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = 0; stage < stages; ++stage) {
      pipeline.consumer_wait(read);
      mma.accumulate_ = GMMA::ScaleOut::Zero;
      warpgroup_fence_operand(part);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kMmas; ++i) {
        gemm(mma, a(_, _, i, read.index()), b(_, _, i, read.index()), part);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      if constexpr (Factors::kAreThere) factors.take(stage);
      warpgroup_wait<0>();
      warpgroup_fence_operand(part);
      pipeline.consumer_release(read);
      ++read;
      promote(sums, part, factors);
    }
  }

  // Every stage has been released.
  CUTLASS_DEVICE void mma_tail(MainloopPipeline, PipelineState, int) {}

 private:
  template <class Sums>
  CUTLASS_DEVICE static void promote(Sums& sums, Sums const& part, Factors const& factors) {
    if constexpr (!Factors::kAreThere) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(sums); ++i) sums(i) += part(i);
    } else if constexpr (Factors::kRows > 2) {
      promote_by(sums, part, [&](int j, int, int c) { return factors.now[j * 2 + c][0]; });
    } else if (Factors::kBlocks == 1 || factors.boundary() == kPromoted) {
      promote_by(sums, part, [&](int j, int r, int) { return factors.now[r][j * 8 >= kPromoted]; });
    } else {
      promote_by(sums, part, [&](int j, int r, int) { return factors.now[r][j * 8 >= kPromoted / 2]; });
    }
  }

  // `factor(j, r, c)`: of the eight j of columns, of which a thread has two, and two rows (epilogue.cuh).
  template <class Sums, class Factor>
  CUTLASS_DEVICE static void promote_by(Sums& sums, Sums const& part, Factor const& factor) {
    static_assert(cute::size<1>(Sums{}) == 1, "a warpgroup has 64 rows");
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < cute::get<1>(typename Base::TileShape{}) / 8; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int r = i / 2, c = i % 2;
        auto const at = cute::make_coord(cute::make_coord(c, r, j), 0, 0);
        sums(at) = fmaf(part(at), factor(j, r, c), sums(at));
      }
    }
  }
};

}  // namespace epigemm::sm90_tma
