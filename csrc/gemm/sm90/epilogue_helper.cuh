// The helper warp's part of an epilogue (epilogue.cuh): there is one for each warpgroup.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "gemm/sm90/epilogue_layout.cuh"
#include "gemm/sm90/tensor_map.h"

namespace epigemm::sm90 {

template <class C>
struct EpilogueHelper {
  using Operand = typename C::Operand;

  EpilogueParams const& params;
  typename C::Shared& shared;
  const int group, lane;
  CUtensorMap const* stored;  // of the functor's second values
  const EpilogueLayout<C> layout{};

  // Brings a tile's operands. `is_again`: of one that is computed again (kernel.cuh). `of_group`: the tile's group,
  // each of which has vectors along D's columns of its own.
  CUTLASS_DEVICE void bring(Place tile, bool is_again, int of_group) const {
    const int ahead = C::kIsGrouped ? of_group * (C::kTransposed ? params.rows : params.columns) : 0;
    bring_vectors(layout.by_column, tile.column, params.columns, kPassRows, is_again, C::kTransposed ? 0 : ahead);
    bring_vectors(layout.by_row, tile.row, params.rows, C::kRowStep, is_again, C::kTransposed ? ahead : 0);
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
  // tile's operands. `group_end`: the row of D behind the tile's group.
  CUTLASS_DEVICE void store(SlotRing& ring, Place tile, int group_end) const {
    const int steps = C::kPasses * values();
    for (int step = 0; step < steps; ++step, ring.advance(layout.slots)) {
      const int pass = step / values();
      const bool is_result = step % values() == 0;
      if (lane == 0) {
        wait_for(shared.written[group][ring.slot], ring.phase);
        CUtensorMap const* const to = is_result ? &params.out : stored;
        for_each_slab(tile, pass, ring.slot, [&](const char* slab, int x, int y) {
          if constexpr (C::kIsGrouped) {
            cute::SM90_TMA_STORE_4D::copy(to, slab, x, kGroupedRows - group_end + y, group_end, int{kGroupedRows});
          } else {
            cute::SM90_TMA_STORE_2D::copy(to, slab, x, y);
          }
        });
        cute::tma_store_arrive();
      }
      if (step + layout.slots >= steps) continue;
      if (lane == 0) cute::tma_store_wait<0>();
      make_ready(tile, step + layout.slots, ring.slot);
    }
    __syncwarp();
    if (layout.hands_over) Handover::of_room(group).wait();
  }

  // Before tiles are stored again: what was stored is in memory, where two stores have no order.
  CUTLASS_DEVICE void wait_for_stores() const {
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }

  // Before the CTA ends: TMA has read all slots.
  CUTLASS_DEVICE void end() const {
    if (lane == 0) cute::tma_store_wait<0>();
  }

 private:
  // The functor's, for each of which a pass has a step of its own.
  CUTLASS_DEVICE static int values() { return C::has_store() ? 2 : 1; }

  // An absent vector is read as zeros. From one block of 64 numbers to the next there are `step` numbers; `ahead` are
  // ahead of the first one.
  template <class Vectors>
  CUTLASS_DEVICE void bring_vectors(Vectors const& vectors, int begin, int end, int step, bool is_again,
                                    int ahead) const {
    constexpr int kEach = (Vectors::kLength + 31) / 32;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Vectors::kCount; ++i) {
      const int kind = vectors.kinds[i];
      if (kind == open::kUnread) continue;
      const void* const data = vectors.data(params, i, is_again);
      const int apart = vectors.step(params, i);
      float numbers[kEach];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kEach; ++j) {
        const int local = j * 32 + lane, at = begin + local / kPassRows * step + local % kPassRows;
        numbers[j] = 0;
        if (!data || at >= end) continue;
        numbers[j] = kind == open::kOfCompute ? static_cast<float const*>(data)[ahead + at * apart]
                                              : static_cast<float>(static_cast<Operand const*>(data)[ahead + at]);
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
    const Place place{tile.row + pass / C::kPassesOfRow * C::kRowStep,
                      tile.column + pass % C::kPassesOfRow * C::kPassColumns};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < C::kSlabs; ++i) {
      const Slab slab = C::slab(/*slot=*/0, place, i);
      visit(layout.slot(shared, group, slot) + slab.address, slab.x, slab.y);
    }
  }

  // By all lanes, of which the first one counts.
  CUTLASS_DEVICE void make_ready(Place tile, int step, int slot) const {
    constexpr auto kCached = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    Barrier& ready = shared.ready[group][slot];
    if (lane != 0) return;
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
