// Products whose rows of x are in groups, each of which is multiplied by a weight of its own (Groups in
// gemm/problem.h). Where the groups end is read on the device, so that the kernel ahead may have computed it.
#pragma once

#include "cutlass/cutlass.h"
#include "gemm/grid.h"

namespace epigemm::sm90 {

// The group of a tile; without rows behind the last tile.
struct Group {
  int index = 0, begin = 0, end = 0;  // its weight, and its rows of D
  int tile = 0;                       // the number of its first tile
};

// What the kernel's parameters say of groups; nothing if it has none.
template <bool IsGrouped>
struct GroupParams {};

template <>
struct GroupParams<true> {
  const int* ends;  // the row behind each group, on the device; they may be anything. Null: all groups are alike
  int count;
  int rows;  // of each, if they are alike
};

// Finds the groups of a warp's tiles, whose numbers only grow. Looks at 32 groups at once, by all lanes.
class GroupSearch {
 public:
  // m: rows of D. tile_rows: of the tiles that one line of the grid has; across: how many tiles it has.
  CUTLASS_DEVICE Group find(GroupParams<true> const& groups, int tile, int m, int tile_rows, int across) {
    if (!groups.ends) {
      const int own = ceil_div(groups.rows, tile_rows) * across, index = tile / own;
      if (index >= groups.count) return {};
      return {index, index * groups.rows, (index + 1) * groups.rows, index * own};
    }
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (; first_ < groups.count; first_ += 32) {
      // An end that falls, or is not a row's, must not lead out of D: it counts as the end before it, or as m.
      int end = first_ + lane < groups.count ? min(read(groups.ends + first_ + lane), m) : 0;
      end = scan(max(end, end_), lane, [](int a, int b) { return max(a, b); });
      int begin = __shfl_up_sync(kAll, end, 1);
      if (lane == 0) begin = end_;
      const int own = ceil_div(end - begin, tile_rows) * across;
      const int behind = tiles_ + scan(own, lane, [](int a, int b) { return a + b; });
      if (const unsigned found = __ballot_sync(kAll, behind > tile)) {
        const int at = __ffs(static_cast<int>(found)) - 1;
        return {first_ + at, __shfl_sync(kAll, begin, at), __shfl_sync(kAll, end, at),
                __shfl_sync(kAll, behind - own, at)};
      }
      end_ = __shfl_sync(kAll, end, 31);
      tiles_ = __shfl_sync(kAll, behind, 31);
    }
    return {};
  }

 private:
  static constexpr unsigned kAll = ~0u;

  // By a load that compilers leave behind the wait for the kernel ahead, which may have written the end.
  CUTLASS_DEVICE static int read(const int* end) {
    int value;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(end) : "memory");
    return value;
  }

  template <class Combine>
  CUTLASS_DEVICE static int scan(int value, int lane, Combine const& combine) {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kAll, value, step);
      if (lane >= step) value = combine(value, before);
    }
    return value;
  }

  int first_ = 0, end_ = 0, tiles_ = 0;  // the groups that are looked at; the rows and tiles ahead of them
};

}  // namespace epigemm::sm90
