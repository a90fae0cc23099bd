// A warpgroup's statistics of the results that it has put into slots (epilogue.cuh). Each of its four warps reduces a
// quarter of a slot: the work of one warp would take longer than the mainloop that hides it if K is short. Two slots
// are reduced together where that can be, because a warp waits longer for one than it computes.
#pragma once

#include "gemm/sm90/epilogue_layout.cuh"

namespace epigemm::sm90 {

// Words at an address in shared memory.
struct SharedLoad {
  CUTLASS_DEVICE static uint32_t word(uint32_t address) {
    uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
  }
};

// 1 / count, computed where it stands: neither a division nor a number that is kept through a loop. The sums leave few
// registers.
CUTLASS_DEVICE float inverse_of(int count) {
  float inverse;
  asm volatile("{.reg .f32 number; cvt.rn.f32.s32 number, %1; rcp.approx.ftz.f32 %0, number;}"
               : "=f"(inverse)
               : "r"(count));
  return inverse;
}

template <class C>
struct EpilogueMoments {
  using Numbers = WordNumbers<typename C::Output>;

  // Results of a pass.
  struct Filled {
    uint32_t slot;  // its address
    Place place;
  };

  // Of one pass, by all threads of a warpgroup.
  CUTLASS_DEVICE static void reduce(EpilogueParams const& params, int group, Filled filled, int slots) {
    meet(group);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < C::kSlabs; ++i) {
      const Slab slab = C::slab(filled.slot, filled.place, i);
      reduce_slabs(params, slab, Slab{0, slab.x, slab.y});
    }
    // If the slot's mbarrier is told of the pass afterwards, it orders these reads before the next writes. Racecheck
    // does not see that, because one lane arrives for its warp; where there are several slots, the warps meet again
    // before this one is written.
    if (slots == 1) meet(group);
  }

  // Of two passes, whose slots may be read by TMA meanwhile, but not written.
  CUTLASS_DEVICE static void reduce(EpilogueParams const& params, int group, Filled first, Filled second, int slots) {
    meet(group);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < C::kSlabs; ++i) {
      reduce_slabs(params, C::slab(first.slot, first.place, i), C::slab(second.slot, second.place, i));
    }
    // With four slots the warps meet again before one of these is written.
    if (slots < 4) meet(group);
  }

 private:
  // All four warps. Accesses of shared memory are not moved across it.
  CUTLASS_DEVICE static void meet(int group) {
    constexpr int kFirstBarrier = 6;  // behind those of Handover
    asm volatile("" ::: "memory");
    cutlass::arch::NamedBarrier::sync(128, kFirstBarrier + group);
    asm volatile("" ::: "memory");
  }

  // The second slab has the address 0 if there is none.
  CUTLASS_DEVICE static void reduce_slabs(EpilogueParams const& params, Slab one, Slab two) {
    const int rows = C::kTransposed ? params.columns : params.rows;
    const int columns = C::kTransposed ? params.rows : params.columns;
    reduce_columns(params.column_moments, rows, columns, one.address, one.x, one.y, two.address, two.x, two.y);
  }

  CUTLASS_DEVICE static uint32_t own_warp() { return threadIdx.x / 32 % 4; }
  CUTLASS_DEVICE static uint32_t own_lane() { return threadIdx.x % 32; }

  // The passes of a tile are unrolled, but they share the function that follows: a copy for each of them would
  // exceed the instruction cache. All arguments are numbers, which are passed in registers.

  // The moments of each column of two slabs at (x, y) in D, which has `rows` x `columns`.
  __device__ __noinline__ static void reduce_columns(BlockMoments<float>* moments, int rows, int columns, uint32_t slab,
                                                     int x, int y, uint32_t slab2, int x2, int y2) {
    using OfLane = SlabMoments<Numbers, C::kRowBytes, C::kDRows, SharedLoad>;
    const uint32_t warp = own_warp(), lane = own_lane();
    const auto put = [&](OfLane& of_lane, int x, int y, float inverse) {
      const int column = x + static_cast<int>(OfLane::column_of(warp, lane));
      BlockMoments<float>* const to = moments + static_cast<int64_t>(y / C::kDRows) * columns + column;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Numbers::kCount; ++i) {
        gather<OfLane::kWords>(of_lane.columns[i], 32);
        if (lane < OfLane::kWords && column + i < columns) to[i] = of_lane.columns[i].moments_by(inverse);
      }
    };
    constexpr float kInverse = 1.0f / C::kDRows;
    const bool are_whole = max(y, y2) + C::kDRows <= rows;
    if (are_whole && slab2) {
      OfLane one(slab, warp, lane), two(slab2, warp, lane);
      put(one, x, y, kInverse);
      put(two, x2, y2, kInverse);
      return;
    }
    if (are_whole) {
      OfLane one(slab, warp, lane);
      put(one, x, y, kInverse);
      return;
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < (slab2 ? 2 : 1); ++i, slab = slab2, x = x2, y = y2) {
      const int own = min(C::kDRows, rows - y);
      if (own <= 0) continue;
      OfLane of_lane(slab, warp, lane, own);
      put(of_lane, x, y, inverse_of(own));
    }
  }

  // Adds the sums of lanes that are a multiple of `First` apart, below `end`.
  template <int First>
  CUTLASS_DEVICE static void gather(PivotSums<float>& sums, int end) {
    CUTLASS_PRAGMA_UNROLL
    for (int apart = First; apart < end; apart *= 2) {
      sums.sum += __shfl_xor_sync(~0u, sums.sum, apart);
      sums.squares += __shfl_xor_sync(~0u, sums.squares, apart);
    }
  }
};

}  // namespace epigemm::sm90
