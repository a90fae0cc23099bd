// What a warpgroup sees of its 64 rows of a weight while it splits them, and what follows (weight_scale.h): whether the
// scales with which it did are the rows' own, and what the range check has to know of them.
#pragma once

#include <cuda_fp16.h>

#include "cutlass/cutlass.h"
#include "gemm/fp16_slices/weight_scale.h"

namespace epigemm::sm90_fp16x3 {

// The rows of a weight in fp32, and what is known of them: by row.
struct WeightRows {
  const float* data = nullptr;
  int64_t row_stride = 0, column_stride = 1;  // elements
  int rows = 0, columns = 0;
  const float* roots = nullptr;   // of the scales to begin with: of any (fp16_slices::some_root)
  float* found_roots = nullptr;   // of the rows' own scales: written by every tile
  int32_t* statistics = nullptr;  // for the range check, as of SplitMatrix: written by the first tile of a row
  int32_t* tiny = nullptr;
  int32_t* statistics_of_groups = nullptr;  // the same, of a warp's rows
  // Where the next call begins, or null: the first tile writes what was wrong, and behind all rows for how many calls
  // somebody will look.
  float* remembered = nullptr;

  CUTLASS_DEVICE WeightRows const& of(int /*group*/) const { return *this; }
  CUTLASS_DEVICE float* looks() const { return remembered + rows; }
};

// The same of groups' weights, and what is known of their rows one group behind the other. A group without rows of x
// has no tile: nothing is written of its weight.
struct GroupedWeightRows : WeightRows {
  int64_t apart = 0;  // elements, from a group's weight to the next one's
  float* all_looks = nullptr;

  // Of one group.
  struct Rows : WeightRows {
    float* all_looks;

    CUTLASS_DEVICE float* looks() const { return all_looks; }
  };

  CUTLASS_DEVICE Rows of(int group) const {
    const int ahead = group * rows;
    Rows part{*this, all_looks};
    part.data += group * apart;
    part.roots += ahead, part.found_roots += ahead, part.statistics += ahead, part.tiny += ahead;
    part.statistics_of_groups += group * static_cast<int>(fp16_slices::groups_of(rows));
    if (remembered) part.remembered += ahead;
    return part;
  }
};

// One thread's part. It has two rows, eight apart, which it shares with the three other lanes of its four.
struct RowJudge {
  float scales[2];

  template <class Rows>
  CUTLASS_DEVICE void take(Rows const& of, int row_of_group, bool is_again) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(row_of_group, lane(), r);
      const float* const roots = is_again ? of.found_roots : of.roots;
      scales[r] = row < of.rows ? fp16_slices::scale_of_root(roots[row]) : 1.0f;
      largest_[r] = __half2half2(__ushort_as_half(0));
      large_[r] = 0;
    }
  }

  // Two neighbours' hi.
  CUTLASS_DEVICE void see(int r, __half2 high) { largest_[r] = __hmax2_nan(largest_[r], __habs2(high)); }

  CUTLASS_DEVICE void count(int r, __half2 high) { large_[r] = fp16_slices::count_pair(large_[r], large(high)); }

  // What is known behind a part of K.
  struct Seen {
    __half2 largest[2];
    int large[2];

    CUTLASS_DEVICE uint4 words() const {
      return {fp16_slices::bit_cast<uint32_t>(largest[0]), fp16_slices::bit_cast<uint32_t>(largest[1]),
              static_cast<uint32_t>(large[0]), static_cast<uint32_t>(large[1])};
    }

    // Those of another part.
    CUTLASS_DEVICE void add(uint4 words) {
      largest[0] = __hmax2_nan(largest[0], fp16_slices::bit_cast<__half2>(words.x));
      largest[1] = __hmax2_nan(largest[1], fp16_slices::bit_cast<__half2>(words.y));
      large[0] += static_cast<int>(words.z), large[1] += static_cast<int>(words.w);
    }
  };

  CUTLASS_DEVICE Seen seen() const {
    return {{largest_[0], largest_[1]}, {fp16_slices::counted(large_[0]), fp16_slices::counted(large_[1])}};
  }

  // Behind a tile. Returns whether it has to be computed again: the same in all lanes of a warp.
  template <class Rows>
  CUTLASS_DEVICE bool look(Rows const& of, Seen const& seen, int row_of_group, bool counts) const {
    bool is_wrong = false;
    int32_t least_large = fp16_slices::kLargeMask, flags = 0;  // of the warp's rows
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const uint32_t largest = largest_of_row(seen.largest[r]);
      const int large = sum_of_row(seen.large[r]);
      const int row = row_of(row_of_group, lane(), r);
      const bool is_right = fp16_slices::is_scale_of_row(largest, scales[r]);
      const bool writes = lane() % 4 == 0 && row < of.rows;
      if (writes && is_right) {
        of.found_roots[row] = root_of(scales[r]);
        if (counts) {
          const int32_t statistics = fp16_slices::weight_statistics(large, largest == 0, of.columns);
          of.statistics[row] = statistics;
          of.tiny[row] = fp16_slices::kUncounted;
          least_large = min(least_large, statistics & fp16_slices::kLargeMask);
          flags |= statistics & ~fp16_slices::kLargeMask;
        }
      }
      for (unsigned left = __ballot_sync(0xffffffffu, writes && !is_right); left; left &= left - 1) {
        const int of_row = read_row(of, row_of(row_of_group, __ffs(static_cast<int>(left)) - 1, r), counts);
        is_wrong |= of_row == 0;
        least_large = 0, flags |= of_row;
      }
    }
    if (counts) write_group(of, row_of(row_of_group, 0, 0), least_large, flags);
    return is_wrong;
  }

 private:
  static constexpr int kHeld = 16;  // numbers of a row that a lane has on their way

  __half2 largest_[2];
  uint32_t large_[2];

  CUTLASS_DEVICE static unsigned large(__half2 high) {
    return __hge2_mask(__habs2(high), __float2half2_rn(fp16_slices::kLargeHigh));
  }

  CUTLASS_DEVICE static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  CUTLASS_DEVICE static int row_of(int row_of_group, int lane, int r) {
    return row_of_group + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4 + r * 8;
  }

  CUTLASS_DEVICE static float root_of(float scale) {
    return fp16_slices::row_root(static_cast<int>(__float_as_uint(scale) >> 23) - 127);
  }

  CUTLASS_DEVICE static int sum_of_row(int mine) {
    mine += __shfl_xor_sync(0xffffffffu, mine, 1);
    return mine + __shfl_xor_sync(0xffffffffu, mine, 2);
  }

  CUTLASS_DEVICE static uint32_t largest_of_row(__half2 of_thread) {
    const uint32_t both = fp16_slices::bit_cast<uint32_t>(of_thread);
    uint32_t mine = max(both & 0xffff, both >> 16);  // of numbers without a sign, bits are ordered as they are
    mine = max(mine, __shfl_xor_sync(0xffffffffu, mine, 1));
    return max(mine, __shfl_xor_sync(0xffffffffu, mine, 2));
  }

  CUTLASS_DEVICE static void write_group(WeightRows const& of, int row, int32_t least_large, int32_t flags) {
    least_large = __reduce_min_sync(0xffffffffu, least_large);
    flags = static_cast<int32_t>(__reduce_or_sync(0xffffffffu, static_cast<unsigned>(flags)));
    if (lane() == 0 && row < of.rows) of.statistics_of_groups[row / fp16_slices::kGroupRows] = least_large | flags;
  }

  // The warp reads a row whose scale was wrong, and writes the right one. Returns its flags: one with numbers that are
  // not finite is the fixup's, and there is no use in computing it again.
  template <class Rows>
  CUTLASS_DEVICE static int read_row(Rows const& of, int row, bool counts) {
    const float* const data = of.data + row * of.row_stride;
    float largest = 0.0f;
    int flags = 0;
    for (int first = lane(); first < of.columns; first += kHeld * 32) {
      float held[kHeld];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const int k = first + i * 32;
        held[i] = k < of.columns ? data[k * of.column_stride] : 0.0f;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        largest = fp16_slices::larger(largest, fp16_slices::finite_magnitude(held[i]));
        flags |= fp16_slices::element_flags(held[i]);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 16; distance > 0; distance /= 2) {
      largest = fp16_slices::larger(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    flags = static_cast<int>(__reduce_or_sync(0xffffffffu, static_cast<unsigned>(flags)));
    if (lane() == 0) {
      const float root = fp16_slices::row_root(fp16_slices::weight_exponent(largest));
      of.found_roots[row] = root;
      if (counts) {
        if (of.remembered) {
          of.remembered[row] = root;
          if (flags == 0) *of.looks() = __int_as_float(fp16_slices::kLooks);
        }
        of.statistics[row] = flags;
        of.tiny[row] = 0;
      }
    }
    return flags;
  }
};

}  // namespace epigemm::sm90_fp16x3
