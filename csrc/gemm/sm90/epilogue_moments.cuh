// A warpgroup's statistics of the results that it has put into a slot (epilogue.cuh). Each of its four warps reduces a
// quarter of the slot: the work of one warp would take longer than the mainloop that hides it if K is short.
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

  CUTLASS_DEVICE static void chunk(uint32_t address, uint32_t (&words)[4]) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address));
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

  // Of the results of a pass at `place`, by all threads of a warpgroup.
  CUTLASS_DEVICE static void reduce(EpilogueParams const& params, int group, uint32_t warp, uint32_t lane, Place place,
                                    char* slot, int slots) {
    meet(group);
    const uint32_t from = cute::cast_smem_ptr_to_uint(slot);
    const int rows = C::kTransposed ? params.columns : params.rows;
    const int columns = C::kTransposed ? params.rows : params.columns;
    if (params.column_moments) {
      C::for_each_slab(from, place, [&](uint32_t slab, int x, int y) {
        reduce_columns(params.column_moments, columns, warp, lane, slab, x, y, rows - y);
      });
    }
    if (params.row_moments) {
      C::for_each_slab(from, place, [&](uint32_t slab, int x, int y) {
        reduce_rows(params.row_moments, rows, warp, lane, slab, x, y, columns - x);
      });
    }
    // The slot's mbarriers order these reads before the next pass's writes. Racecheck does not see that, because one
    // lane arrives for its warp; where there are several slots, the warps meet again before this one is written.
    if (slots == 1) meet(group);
  }

 private:
  // All four warps. Accesses of shared memory are not moved across it.
  CUTLASS_DEVICE static void meet(int group) {
    constexpr int kFirstBarrier = 6;  // behind those of Handover
    asm volatile("" ::: "memory");
    cutlass::arch::NamedBarrier::sync(128, kFirstBarrier + group);
    asm volatile("" ::: "memory");
  }

  // The passes of a tile are unrolled, but they share the two functions that follow: a copy for each of them would
  // exceed the instruction cache. All arguments are numbers, which are passed in registers.

  // The moments of each column of a slab at (x, y) in D, of which `rows` rows follow.
  __device__ __noinline__ static void reduce_columns(BlockMoments<float>* moments, int columns, uint32_t warp,
                                                     uint32_t lane, uint32_t slab, int x, int y, int rows) {
    using OfLane = SlabMoments<Numbers, C::kRowBytes, C::kDRows, SharedLoad>;
    rows = min(C::kDRows, rows);
    if (rows <= 0) return;
    const float inverse = inverse_of(rows);
    OfLane of_lane(slab, warp, lane, rows);
    const int column = x + static_cast<int>(OfLane::column_of(warp, lane));
    BlockMoments<float>* const to = moments + static_cast<int64_t>(y / C::kDRows) * columns + column;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Numbers::kCount; ++i) {
      gather<OfLane::kWords>(of_lane.columns[i], 32);
      if (lane < OfLane::kWords && column + i < columns) to[i] = of_lane.columns[i].moments_by(inverse);
    }
  }

  // Those of each of D's `rows` rows, by two lanes; `columns` columns follow.
  __device__ __noinline__ static void reduce_rows(BlockMoments<float>* moments, int rows, uint32_t warp, uint32_t lane,
                                                  uint32_t slab, int x, int y, int columns) {
    using OfHalf = SlabRowMoments<Numbers, C::kRowBytes, SharedLoad>;
    static_assert(2 * OfHalf::kNumbers == C::kSlabColumns && C::kDRows % kReducingWarps == 0);
    constexpr uint32_t kRows = C::kDRows / kReducingWarps;  // of a warp
    columns = min(C::kSlabColumns, columns);
    if (columns <= 0) return;
    const float inverse = inverse_of(columns);
    // 32 bits count the blocks of any matrix that a GPU holds.
    const uint32_t to = static_cast<uint32_t>(x / C::kSlabColumns) * rows + y;
    CUTLASS_PRAGMA_NO_UNROLL
    for (uint32_t first = 0; first < kRows; first += 16) {
      const uint32_t of_warp = first + lane / 2, row = warp * kRows + of_warp;
      // Rows beyond those of the warp are read, but they are another one's.
      PivotSums<float> sums = OfHalf(slab, min(row, C::kDRows - 1u), lane % 2, columns).sums();
      gather<1>(sums, 2);
      if (lane % 2 == 0 && of_warp < kRows && static_cast<int>(y + row) < rows) {
        moments[to + row] = sums.moments_by(inverse);
      }
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
