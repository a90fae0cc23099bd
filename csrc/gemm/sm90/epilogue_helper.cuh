// The helper warp's part of an epilogue (epilogue.cuh): there is one for each warpgroup.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "gemm/sm90/epilogue_layout.cuh"

namespace epigemm::sm90 {

template <class C>
struct EpilogueHelper {
  using Operand = typename C::Operand;

  EpilogueParams const& params;
  typename C::Shared& shared;
  const int group, lane;
  CUtensorMap const* stored;  // of the functor's second values
  const EpilogueLayout<C> layout{};

  // Brings a tile's operands.
  CUTLASS_DEVICE void bring(Place tile) const {
    bring_vectors(layout.by_column, tile.column, params.columns, kPassRows);
    bring_vectors(layout.by_row, tile.row, params.rows, C::kRowStep);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < open::kScalars; ++i) {
      if (epigemm_operand(open::kScalar0 + i) == open::kUnread || lane != i) continue;
      auto* const data = static_cast<float const*>(params.operands.data[open::kScalar0 + i]);
      shared.scalars[group][i] = data ? *data : params.operands.scalars[i];
    }
    __syncwarp();
    if (layout.hands_over) Handover::of_operands(group).arrive();
  }

  // Prepares the first passes of a tile, whose slots TMA may still be reading.
  CUTLASS_DEVICE void prepare(SlotRing ring, Place tile) const {
    if (lane == 0) cute::tma_store_wait<0>();
    for (int step = 0; step < layout.slots; ++step, ring.advance(layout.slots)) make_ready(tile, step, ring.slot);
  }

  // Starts the stores of a tile's results, and of the functor's second values. Afterwards there is room for the next
  // tile's operands.
  CUTLASS_DEVICE void store(SlotRing& ring, Place tile) const {
    const int steps = C::kPasses * values();
    for (int step = 0; step < steps; ++step, ring.advance(layout.slots)) {
      const int pass = step / values();
      const bool is_result = step % values() == 0;
      if (lane == 0 || C::has_moments(params)) wait_for(shared.written[group][ring.slot], ring.phase);
      if (lane == 0) {
        CUtensorMap const* const to = is_result ? &params.out : stored;
        for_each_slab(tile, pass, ring.slot,
                      [&](char* slab, int x, int y) { cute::SM90_TMA_STORE_2D::copy(to, slab, x, y); });
        cute::tma_store_arrive();
      }
      if (is_result && C::has_moments(params)) reduce(tile, pass, ring.slot);
      if (step + layout.slots >= steps) continue;
      if (lane == 0) cute::tma_store_wait<0>();
      make_ready(tile, step + layout.slots, ring.slot);
    }
    __syncwarp();
    if (layout.hands_over) Handover::of_room(group).wait();
  }

  // Before the CTA ends: TMA has read all slots.
  CUTLASS_DEVICE void end() const {
    if (lane == 0) cute::tma_store_wait<0>();
  }

 private:
  // The functor's, for each of which a pass has a step of its own.
  CUTLASS_DEVICE static int values() { return C::has_store() ? 2 : 1; }

  // An absent vector is read as zeros. From one block of 64 numbers to the next there are `step` numbers.
  template <class Vectors>
  CUTLASS_DEVICE void bring_vectors(Vectors const& vectors, int begin, int end, int step) const {
    constexpr int kEach = (Vectors::kLength + 31) / 32;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Vectors::kCount; ++i) {
      const int kind = vectors.kinds[i];
      if (kind == open::kUnread) continue;
      const void* const data = vectors.data(params, i);
      float numbers[kEach];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kEach; ++j) {
        const int local = j * 32 + lane, at = begin + local / kPassRows * step + local % kPassRows;
        numbers[j] = 0;
        if (!data || at >= end) continue;
        numbers[j] = kind == open::kOfCompute ? static_cast<float const*>(data)[at]
                                              : static_cast<float>(static_cast<Operand const*>(data)[at]);
      }
      float* const to = layout.vector(shared, group, vectors, i);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kEach; ++j) {
        if (j * 32 + lane < Vectors::kLength) to[j * 32 + lane] = numbers[j];
      }
    }
  }

  // Calls `visit` with each slab of a pass and its place in D.
  template <class Visit>
  CUTLASS_DEVICE void for_each_slab(Place tile, int pass, int slot, Visit const& visit) const {
    const int row = tile.row + pass / C::kPassesOfRow * C::kRowStep;
    const int column = tile.column + pass % C::kPassesOfRow * C::kPassColumns;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < C::kSlabs; ++i) {
      const int along = i * C::kSlabColumns;
      char* const slab = layout.slot(shared, group, slot) + i * C::kSlabBytes;
      if constexpr (C::kTransposed) {
        visit(slab, row + along, column);
      } else {
        visit(slab, column + along, row);
      }
    }
  }

  // Writes the moments of a pass, while TMA reads the slot, too.
  CUTLASS_DEVICE void reduce(Place tile, int pass, int slot) const {
    __syncwarp();
    if (params.column_moments) {
      for_each_slab(tile, pass, slot, [&](char* slab, int x, int y) { reduce_columns(slab, x, y); });
    }
    // The compiler shall not keep a slab's place in registers, of which the columns leave none.
    asm volatile("" : "+r"(pass), "+r"(slot));
    if (params.row_moments) {
      for_each_slab(tile, pass, slot, [&](char* slab, int x, int y) { reduce_rows(slab, x, y); });
    }
    cutlass::arch::fence_view_async_shared();  // the slot may be TMA's to write next
    __syncwarp();
  }

  CUTLASS_DEVICE int rows_of_d() const { return C::kTransposed ? params.columns : params.rows; }
  CUTLASS_DEVICE int columns_of_d() const { return C::kTransposed ? params.rows : params.columns; }

  // The moments of each column of a slab at (x, y) in D.
  CUTLASS_DEVICE void reduce_columns(char* slab, int x, int y) const {
    using Numbers = WordNumbers<typename C::Output>;
    using Lane = SlabMoments<Numbers, C::kRowBytes, SharedWord>;
    const int rows = min(C::kDRows, rows_of_d() - y), columns = columns_of_d(), column = x + Lane::column_of(lane);
    if (rows <= 0) return;
    Lane of_lane(cute::cast_smem_ptr_to_uint(slab), lane, rows);
    BlockMoments<float>* const to = params.column_moments + static_cast<int64_t>(y / C::kDRows) * columns + column;
    const float inverse = inverse_of(rows);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Numbers::kCount; ++i) {
      PivotSums<float>& sums = of_lane.columns[i];
      if constexpr (Lane::kRowsOfLine == 2) {
        sums.sum += __shfl_xor_sync(~0u, sums.sum, 16);
        sums.squares += __shfl_xor_sync(~0u, sums.squares, 16);
      }
      if (lane < Lane::kLanes && column + i < columns) to[i] = sums.moments_by(inverse);
    }
  }

  // Those of each row.
  CUTLASS_DEVICE void reduce_rows(char* slab, int x, int y) const {
    using OfRow = SlabRowMoments<WordNumbers<typename C::Output>, C::kRowBytes, C::kChunksAtOnce, SharedWord>;
    static_assert(OfRow::kNumbers == C::kSlabColumns);
    const int rows = min(C::kDRows, rows_of_d() - y), columns = min(C::kSlabColumns, columns_of_d() - x);
    if (columns <= 0) return;
    // 32 bits count the blocks of any matrix that a GPU holds.
    const uint32_t to = static_cast<uint32_t>(x / C::kSlabColumns) * rows_of_d() + y;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int row = lane; row < rows; row += 32) {
      const OfRow found(cute::cast_smem_ptr_to_uint(slab), row, columns);
      params.row_moments[to + row] = found.moments_by(inverse_of(columns));
    }
  }

  // By all lanes, but without moments only the first one counts.
  CUTLASS_DEVICE void make_ready(Place tile, int step, int slot) const {
    constexpr auto kCached = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    Barrier& ready = shared.ready[group][slot];
    if (lane != 0) {
      if (C::has_moments(params)) ready.arrive();
      return;
    }
    if (epigemm_operand(open::kMatrix0 + C::matrix_by_tma()) == open::kUnread || !params.is_matrix_by_tma) {
      ready.arrive();
      return;
    }
    ready.arrive_and_expect_tx(C::kSlotBytes);
    for_each_slab(tile, step / values(), slot, [&](char* slab, int x, int y) {
      cute::SM90_TMA_LOAD_2D::copy(&params.matrix, reinterpret_cast<uint64_t*>(&ready), kCached, slab, x, y);
    });
  }
};

}  // namespace epigemm::sm90
