// The epilogue of kernels on Hopper whose functor is linked in at run time (csrc/open/contract.h): a warpgroup takes its
// sums through the functor, and a helper warp does all that is not arithmetic.
//
// A warpgroup's part of a tile goes through shared memory in passes of 64 rows and 128 or 64 bytes, several at once.
// For each pass the helper makes a slot ready, with the part of a matrix in it that TMA can bring; the warpgroup puts
// the results there, in the matrix's place; the helper stores them by TMA. Vectors and scalars wait in shared memory as
// fp32: the helper brings those of a tile while the tile before it is in its epilogue. So the warpgroup waits for
// nothing but its slots, and its mainloop hides what the helper does.
#pragma once

#include <cuda.h>

#include "cute/arch/copy_sm75.hpp"
#include "cute/arch/copy_sm90.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/numeric_conversion.h"
#include "open/contract.h"

namespace epigemm::sm90 {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

constexpr int kPassRows = 64;

// What the epilogue reads and writes, but for the sums.
struct EpilogueParams {
  CUtensorMap out, matrix;
  open::Operands<float> operands;
  int m, n;  // of D
  bool is_matrix_by_tma;
};

// Where a tile, or what a warpgroup has of it, begins.
struct Place {
  int row, column;
};

// Operand: the element type of the operands that follow x's. GroupRows: of a tile, that a warpgroup has, in blocks of 64
// that are RowStep rows apart. RowBytes: of a pass. Copies: 2 where the next tile's epilogue may begin at once, 1 where a
// mainloop is in between, under which the helper brings what is read.
template <class Operand_, class Output_, int GroupRows, int RowStep_, int TileN, int Groups, int Slots_, int RowBytes_,
          int Copies_>
struct EpilogueConfig {
  using Operand = Operand_;
  using Output = Output_;
  static constexpr int kGroupRows = GroupRows, kRowStep = RowStep_, kTileN = TileN, kSlots = Slots_,
                       kRowBytes = RowBytes_, kCopies = Copies_;
  static constexpr int kPassColumns = kRowBytes / static_cast<int>(sizeof(Output)), kPassBytes = kPassRows * kRowBytes;
  static constexpr int kPassesOfRow = TileN / kPassColumns;
  static constexpr int kPasses = GroupRows / kPassRows * kPassesOfRow;  // of a tile
  static_assert((kRowBytes == 128 || kRowBytes == 64) && (kCopies == 1 || kCopies == 2));
  static_assert(TileN % kPassColumns == 0 && GroupRows % kPassRows == 0 && Slots_ <= kPasses);

  struct Vectors {
    float columns[open::kColumns][TileN], rows[open::kRows][GroupRows], scalars[open::kScalars];
  };

  struct Shared {
    alignas(1024) char results[Groups][Slots_][kPassBytes];
    alignas(16) Vectors vectors[Groups][Copies_];  // of a tile and of the next one
    Barrier ready[Groups][Slots_], written[Groups][Slots_];
  };

  CUTLASS_DEVICE static void prepare(Shared& shared) {
    for (int i = 0; i < Groups * Slots_; ++i) {
      shared.ready[0][i].init(1);
      shared.written[0][i].init(4);  // warps
    }
  }
};

// Which slot a pass has, and how often the slot has come round.
template <int Slots>
struct SlotRing {
  int slot = 0;
  uint32_t phase = 0;

  CUTLASS_DEVICE void advance() {
    if (++slot == Slots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// Ordinary accesses of shared memory stay behind it.
CUTLASS_DEVICE void wait_for(Barrier const& barrier, uint32_t phase) {
  barrier.wait(phase);
  asm volatile("" ::: "memory");
}

// --- the helper: one warp for each warpgroup ---------------------------------------------------------------------------

template <class C>
struct EpilogueHelper {
  using Operand = typename C::Operand;
  static constexpr uint64_t kCached = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

  EpilogueParams const& params;
  typename C::Shared& shared;
  const int group, lane;

  CUTLASS_DEVICE static Place place_of(Place tile, int pass) {
    return {tile.row + pass / C::kPassesOfRow * C::kRowStep, tile.column + pass % C::kPassesOfRow * C::kPassColumns};
  }

  // `Count` numbers of a vector from `begin` on, in blocks of 64 that are `step` apart. An absent one reads as zeros.
  template <int Count>
  CUTLASS_DEVICE void bring_vector(float* to, int slot, int begin, int end, int step) const {
    const int kind = epigemm_operand(slot);
    if (kind == open::kUnread) return;
    const void* const data = params.operands.data[slot];
    float values[(Count + 31) / 32];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < (Count + 31) / 32; ++i) {
      const int local = i * 32 + lane, at = begin + local / 64 * step + local % 64;
      values[i] = 0;
      if (data && at < end && local < Count) {
        values[i] = kind == open::kOfCompute ? static_cast<float const*>(data)[at]
                                             : static_cast<float>(static_cast<Operand const*>(data)[at]);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < (Count + 31) / 32; ++i) {
      if (i * 32 + lane < Count) to[i * 32 + lane] = values[i];
    }
  }

  CUTLASS_DEVICE void bring_vectors(Place tile, int copy) const {
    typename C::Vectors& to = shared.vectors[group][copy];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < open::kColumns; ++i) {
      bring_vector<C::kTileN>(to.columns[i], open::kColumn0 + i, tile.column, params.n, 64);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < open::kRows; ++i) {
      bring_vector<C::kGroupRows>(to.rows[i], open::kRow0 + i, tile.row, params.m, C::kRowStep);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < open::kScalars; ++i) {
      if (epigemm_operand(open::kScalar0 + i) == open::kUnread || lane != i) continue;
      auto* const data = static_cast<float const*>(params.operands.data[open::kScalar0 + i]);
      to.scalars[i] = data ? *data : params.operands.scalars[i];
    }
    __syncwarp();
  }

  CUTLASS_DEVICE void make_ready(Place tile, int pass, int slot) const {
    Barrier& ready = shared.ready[group][slot];
    if (epigemm_operand(open::kMatrix0) != open::kUnread && params.is_matrix_by_tma) {
      const Place place = place_of(tile, pass);
      ready.arrive_and_expect_tx(C::kPassBytes);
      cute::SM90_TMA_LOAD_2D::copy(&params.matrix, reinterpret_cast<uint64_t*>(&ready), kCached,
                                   shared.results[group][slot], place.column, place.row);
    } else {
      ready.arrive();
    }
  }

  // A tile's operands, and its first passes.
  CUTLASS_DEVICE void begin(SlotRing<C::kSlots> ring, int count, Place tile) const {
    bring_vectors(tile, count % C::kCopies);
    if (lane == 0) {
      for (int pass = 0; pass < C::kSlots; ++pass, ring.advance()) make_ready(tile, pass, ring.slot);
    }
  }

  // Stores the results of the group's `count`th tile, and brings what the next one reads.
  CUTLASS_DEVICE void help(SlotRing<C::kSlots>& ring, int count, Place tile, bool has_next, Place next) const {
    constexpr bool kIsAhead = C::kCopies == 2;
    // The other copy was of the tile before this one, and of that all results are on their way.
    if (kIsAhead && has_next) bring_vectors(next, (count + 1) % 2);
    for (int pass = 0; pass < C::kPasses; ++pass, ring.advance()) {
      if (lane != 0) continue;
      const Place place = place_of(tile, pass);
      wait_for(shared.written[group][ring.slot], ring.phase);
      cute::SM90_TMA_STORE_2D::copy(&params.out, shared.results[group][ring.slot], place.column, place.row);
      cute::tma_store_arrive();
      cute::tma_store_wait<0>();
      const int later = pass + C::kSlots;
      if (later < C::kPasses) {
        make_ready(tile, later, ring.slot);
      } else if (kIsAhead && has_next) {
        make_ready(next, later - C::kPasses, ring.slot);
      }
    }
    __syncwarp();
    if (!kIsAhead && has_next) begin(ring, count + 1, next);
  }
};

// --- a warpgroup ---------------------------------------------------------------------------------------------------------

// One thread's part of the epilogue. Of every 64 rows it has two, eight apart, and of every eight columns two neighbours.
template <class C>
struct EpilogueConsumer {
  using Operand = typename C::Operand;
  using Output = typename C::Output;
  static constexpr bool kIsNarrow = sizeof(Output) == 2;
  static constexpr int kPairs = C::kPassColumns / 8;  // of columns, in a pass
  // Of them at work at once: 192 sums leave few registers.
  static constexpr int kChunk = kIsNarrow && kPairs == 2 ? 2 : kPairs / 2;
  static_assert(sizeof(Operand) == sizeof(Output), "a matrix by TMA lies where the results will");

  EpilogueParams const& params;
  typename C::Shared& shared;
  const int group, warp, lane;

  // --- a slot ------------------------------------------------------------------------------------------------------------

  // 16 bytes of a row, as TMA swizzles them.
  CUTLASS_DEVICE static char* place_in(char* slot, int row, int chunk) {
    const int swizzled = C::kRowBytes == 128 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
    return slot + row * C::kRowBytes + swizzled * 16;
  }

  // 16 bits: where this lane's row of a matrix of 16 x 16 lies, columns 16 i and on.
  CUTLASS_DEVICE char* matrix_row(char* slot, int i) const {
    return place_in(slot, warp * 16 + (lane & 15), (lane >> 4) + 2 * i);
  }

  // 32 bits: where a pair of this thread lies.
  CUTLASS_DEVICE float2* pair(char* slot, int r, int j) const {
    return reinterpret_cast<float2*>(place_in(slot, warp * 16 + lane / 4 + r * 8, 2 * j + lane % 4 / 2) + lane % 2 * 8);
  }

  // --- matrices: words as they lie in memory, two numbers of 16 bits in one -------------------------------------------------

  struct Matrix {
    uint32_t words[kChunk * 4];  // [j][r][c], or [j][r] of 16 bits
    bool is_float;

    CUTLASS_DEVICE float at(int j, int r, int c) const {
      if constexpr (sizeof(Operand) == 2) {
        if (!is_float) {
          const uint32_t word = words[j * 2 + r];
          return static_cast<float>(Operand::bitcast(static_cast<uint16_t>(c ? word >> 16 : word)));
        }
      }
      return __uint_as_float(words[(j * 2 + r) * 2 + c]);
    }

    template <class T>
    CUTLASS_DEVICE void keep(int j, int r, T low, T high) {
      if constexpr (sizeof(T) == 2) {
        words[j * 2 + r] = low.storage | static_cast<uint32_t>(high.storage) << 16;
      } else {
        words[(j * 2 + r) * 2] = __float_as_uint(low);
        words[(j * 2 + r) * 2 + 1] = __float_as_uint(high);
      }
    }
  };

  CUTLASS_DEVICE void take_from_slot(Matrix& to, char* slot, int first) const {
    if constexpr (kIsNarrow) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kChunk; j += 2) {
        uint32_t* const words = &to.words[j * 2];
        cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t*>(matrix_row(slot, (first + j) / 2)), words[0],
                                      words[1], words[2], words[3]);
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kChunk; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          const float2 numbers = *pair(slot, r, first + j);
          to.template keep<float>(j, r, numbers.x, numbers.y);
        }
      }
    }
  }

  // From device memory, where TMA cannot: pairs where rows and pairs agree.
  template <class T>
  CUTLASS_DEVICE void load(Matrix& to, int i, Place place) const {
    auto* const data = static_cast<T const*>(params.operands.data[open::kMatrix0 + i]);
    const int64_t stride = params.operands.matrix_strides[i];
    const uint64_t odd = (reinterpret_cast<uint64_t>(data) | static_cast<uint64_t>(stride) * sizeof(T)) % (2 * sizeof(T));
    const bool has_pairs = odd == 0 && params.n % 2 == 0;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = place.row + warp * 16 + lane / 4 + r * 8, first = place.column + lane % 4 * 2;
      T const* const from = data + row * stride + first;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kChunk; ++j) {
        const bool has_low = row < params.m && first + j * 8 < params.n;
        const bool has_high = row < params.m && first + j * 8 + 1 < params.n;
        cutlass::AlignedArray<T, 2> numbers;
        numbers[0] = numbers[1] = T(0);
        if (has_pairs) {
          if (has_low) numbers = *reinterpret_cast<cutlass::AlignedArray<T, 2> const*>(from + j * 8);
        } else {
          if (has_low) numbers[0] = from[j * 8];
          if (has_high) numbers[1] = from[j * 8 + 1];
        }
        to.template keep<T>(j, r, numbers[0], numbers[1]);
      }
    }
  }

  CUTLASS_DEVICE void take_matrix(Matrix& to, int i, Place place, char* slot, int first) const {
    const int kind = epigemm_operand(open::kMatrix0 + i);
    CUTLASS_PRAGMA_UNROLL
    for (uint32_t& word : to.words) word = 0;
    to.is_float = sizeof(Operand) == sizeof(float) || kind == open::kOfCompute;
    if (kind == open::kUnread) return;
    if (i == 0 && params.is_matrix_by_tma) {
      take_from_slot(to, slot, first);
    } else if (to.is_float) {
      load<float>(to, i, place);
    } else {
      load<Operand>(to, i, place);
    }
  }

  // --- a tile ------------------------------------------------------------------------------------------------------------

  // Element (c, r, j) of a thread's sums: column c of its pair, row r of its two, the eight columns j.
  template <class Sums>
  CUTLASS_DEVICE void finish(SlotRing<C::kSlots>& ring, int count, Sums const& sums, Place tile) const {
    typename C::Vectors const& vectors = shared.vectors[group][count % C::kCopies];
    CUTLASS_PRAGMA_UNROLL
    for (int pass = 0; pass < C::kPasses; ++pass, ring.advance()) {
      const int m = pass / C::kPassesOfRow, n = pass % C::kPassesOfRow;
      char* const slot = shared.results[group][ring.slot];
      wait_for(shared.ready[group][ring.slot], ring.phase);
      finish_pass(vectors, sums, m, n, {tile.row + m * C::kRowStep, tile.column + n * C::kPassColumns}, slot);
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (lane == 0) shared.written[group][ring.slot].arrive();
    }
  }

  template <class Sums>
  CUTLASS_DEVICE void finish_pass(typename C::Vectors const& vectors, Sums const& sums, int m, int n, Place place,
                                  char* slot) const {
    float rows[open::kRows][2], scalars[open::kScalars];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < open::kRows * 2; ++i) {
      rows[i / 2][i % 2] = vectors.rows[i / 2][m * kPassRows + warp * 16 + lane / 4 + i % 2 * 8];
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < open::kScalars; ++i) scalars[i] = vectors.scalars[i];
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kPairs; first += kChunk) {
      Matrix matrices[open::kMatrices];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < open::kMatrices; ++i) {
        take_matrix(matrices[i], i, {place.row, place.column + first * 8}, slot, first);
      }
      uint32_t words[kChunk * 2];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kChunk; ++j) {
        const int at = n * C::kPassColumns + (first + j) * 8 + lane % 4 * 2;
        float2 columns[open::kColumns];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < open::kColumns; ++i) columns[i] = *reinterpret_cast<float2 const*>(&vectors.columns[i][at]);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          float results[2];
          CUTLASS_PRAGMA_UNROLL
          for (int c = 0; c < 2; ++c) {
            auto const column = [&](int i) { return c ? columns[i].y : columns[i].x; };
            results[c] = epigemm_apply(sums(cute::make_coord(c, r, n * kPairs + first + j), m, 0), column(0), column(1),
                                       column(2), column(3), scalars[0], scalars[1], scalars[2], scalars[3], rows[0][r],
                                       rows[1][r], matrices[0].at(j, r, c), matrices[1].at(j, r, c));
          }
          if constexpr (kIsNarrow) {
            words[j * 2 + r] = rounded(results[0], results[1]);
          } else {
            *pair(slot, r, first + j) = make_float2(results[0], results[1]);
          }
        }
      }
      if constexpr (kIsNarrow) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kChunk; j += 2) {
          cute::SM90_U32x4_STSM_N::copy(words[j * 2], words[j * 2 + 1], words[j * 2 + 2], words[j * 2 + 3],
                                        *reinterpret_cast<cute::uint128_t*>(matrix_row(slot, (first + j) / 2)));
        }
      }
    }
    asm volatile("" ::: "memory");  // what was written stays before the fence
  }

  CUTLASS_DEVICE static uint32_t rounded(float low, float high) {
    cutlass::Array<float, 2> both;
    both[0] = low, both[1] = high;
    auto const pair = cutlass::NumericArrayConverter<Output, float, 2>{}(both);
    return reinterpret_cast<uint32_t const&>(pair);
  }
};

}  // namespace epigemm::sm90
