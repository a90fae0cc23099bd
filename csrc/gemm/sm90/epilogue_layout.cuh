// What the helper and the warpgroup of an epilogue share: the layout of shared memory, and the barriers (epilogue.cuh).
#pragma once

#include <cuda.h>

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/numeric_types.h"
#include "gemm/sm90/quantise.cuh"
#include "gemm/sm90/slab.h"
#include "gemm/sm90/tile.h"
#include "open/contract.h"

namespace epigemm::sm90 {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

// What the epilogue reads and writes, except the sums.
struct EpilogueParams {
  CUtensorMap out, matrix;  // of D in memory
  open::Operands<float> operands;
  const float *row_roots, *column_roots;  // read if the sums have roots
  const float* found_roots;               // in place of row_roots, where tiles are computed again (kernel.cuh)
  int row_root_step, column_root_step;    // 0: one for all, if Sums::shares_roots
  BlockMoments<float>* column_moments;    // of D, a block for each pass's rows; null: not wanted
  int rows, columns;
  bool is_matrix_by_tma;
};

// The same for results of 8 bits.
struct QuantisedParams : EpilogueParams {
  OutScale out_scale;
};

// The numbers in a word of 4 bytes of D.
template <class Output>
struct WordNumbers {
  static constexpr int kCount = 4 / static_cast<int>(sizeof(Output));

  CUTLASS_DEVICE static float at(uint32_t word, int i) {
    if constexpr (kCount == 2) {
      return static_cast<float>(Output::bitcast(static_cast<uint16_t>(i ? word >> 16 : word)));
    } else {
      return __uint_as_float(word);
    }
  }
};

// Makes the functor's accumulator from a sum of the mainloop. Here it is the sum itself. has_roots: with a factor for
// its row and one for its column; shares_roots: each of these may be one for all.
struct PlainSums {
  static constexpr bool has_roots = false, shares_roots = false;

  CUTLASS_DEVICE static float apply(float, float, float sum) { return sum; }
};

// Named barriers of a warpgroup and its helper, beside those for turns (kernel.cuh). With mbarriers, on which one lane
// arrives for what the other lanes of its warp wrote, racecheck reports hazards.
class Handover {
 public:
  CUTLASS_DEVICE static Handover of_operands(int group) { return Handover(2 + group); }  // are loaded
  CUTLASS_DEVICE static Handover of_room(int group) { return Handover(4 + group); }      // for the next tile's

  // Ordinary accesses of shared memory are not moved behind an arrival, or before a wait.
  CUTLASS_DEVICE void arrive() const {
    asm volatile("" ::: "memory");
    cutlass::arch::NamedBarrier::arrive(kThreads, id_);
  }
  CUTLASS_DEVICE void wait() const {
    cutlass::arch::NamedBarrier::sync(kThreads, id_);
    asm volatile("" ::: "memory");
  }

 private:
  static constexpr int kThreads = 128 + 32;

  CUTLASS_DEVICE explicit Handover(int id) : id_(id) {}

  const int id_;
};

// The first row and column of a tile, or of a warpgroup's part of it.
struct Place {
  int row, column;
};

// A slab's address in shared memory, and its place in D.
struct Slab {
  uint32_t address;
  int x, y;
};

// Operand: the element type of the operands that follow x's. Sums: what becomes of a sum, from a factor for its row and
// one for its column (PlainSums). GroupRows: of a tile, that a warpgroup has, in blocks of 64 that are RowStep rows
// apart. Slots, SlotBytes: of passes. VectorBytes: for the vectors that a functor reads; more of them take a slot's
// place. Gates: how many of the functor's matrices, the first ones, are sums of a thread's, TileN columns behind the
// accumulator (pair_mainloop.cuh). The others are read from memory. IsGrouped: rows of D are in groups (groups.cuh).
// Output: e4m3 has one scale for all results, and InBlocks one for each row of a tile.
template <class Operand_, class Output_, class Sums_, bool Transposed, int GroupRows, int RowStep_, int TileN,
          int Groups, int Slots_, int SlotBytes, int VectorBytes, int Gates, bool IsGrouped>
struct EpilogueConfig {
  using Operand = Operand_;
  using Output = Output_;
  using Sums = Sums_;
  static constexpr bool kTransposed = Transposed, kIsGrouped = IsGrouped;
  static constexpr int kGroupRows = GroupRows, kRowStep = RowStep_, kTileN = TileN, kSlots = Slots_,
                       kSlotBytes = SlotBytes, kVectorBytes = VectorBytes, kGates = Gates;
  static constexpr int kPassColumns = SlotBytes / kPassRows / static_cast<int>(sizeof(Output));
  static constexpr int kPassesOfRow = TileN / kPassColumns;
  static constexpr int kPasses = GroupRows / kPassRows * kPassesOfRow;  // of a tile
  static_assert(TileN % kPassColumns == 0 && GroupRows % kPassRows == 0 && Slots_ <= kPasses);

  // A slot has rows of D of up to 128 bytes, swizzled as by TMA. If D's part of a pass is wider, it has several slabs
  // of such rows.
  static constexpr int kDColumns = Transposed ? kPassRows : kPassColumns;
  static constexpr int kRowBytes = cute::min(128, kDColumns* static_cast<int>(sizeof(Output)));
  static constexpr int kSlabs = kDColumns * static_cast<int>(sizeof(Output)) / kRowBytes,
                       kSlabBytes = SlotBytes / kSlabs;
  static_assert((kRowBytes == 128 || kRowBytes == 64) && kSlabBytes % 1024 == 0 && VectorBytes % 1024 == 0);
  static constexpr int kDRows = Transposed ? kPassColumns : kPassRows;  // of D, in a pass
  static constexpr int kSlabColumns = kDColumns / kSlabs;               // of D

  static constexpr bool kIsQuantised = sizeof(Output) == 1, kIsInBlocks = std::is_same_v<Output, InBlocks>;
  static_assert(!kIsInBlocks || (!Transposed && TileN == kBlockColumns && kPassColumns == TileN),
                "a pass has a block of each row");
  using Params = std::conditional_t<kIsQuantised, QuantisedParams, EpilogueParams>;

  // Of rows, and of each weight's columns.
  static constexpr int kRoots = Sums::has_roots ? 1 : 0, kColumnRoots = kRoots * (1 + Gates);
  static_assert(Gates == 0 || !Transposed, "no such epilogue");

  // Kernels of a single product can write statistics of D, and the functor's second values if it has them.
  static constexpr bool kReduces = Gates == 0 && !kIsQuantised && !IsGrouped;
  CUTLASS_DEVICE static bool has_store() { return kReduces && epigemm_has_store(); }

  // The number of the matrix that TMA loads: the first one that is read from memory and shares no rows.
  CUTLASS_DEVICE static int matrix_by_tma() { return epigemm_shares_rows(open::kMatrix0 + Gates) ? Gates + 1 : Gates; }

  static constexpr int kByRow = (Transposed ? open::kColumns : open::kRows) + kRoots;  // vectors; roots come last
  static constexpr int kByColumn = (Transposed ? open::kRows : open::kColumns) + kColumnRoots;

  static constexpr int kMostVectorBytes = (kByRow * GroupRows + kByColumn * TileN) * static_cast<int>(sizeof(float));
  static_assert(kMostVectorBytes <= VectorBytes + (Slots_ > 1 ? SlotBytes : 0), "a slot too many");

  struct Shared {  // at a multiple of 1024 bytes, which swizzling requires
    alignas(16) char memory[Groups][Slots_ * SlotBytes + VectorBytes];  // slots, then vectors
    float scalars[Groups][open::kScalars];
    Barrier ready[Groups][Slots_], written[Groups][Slots_];
  };

  // One lane of a warp arrives, behind the proxy's fence and the warp's barrier.
  CUTLASS_DEVICE static void prepare(Shared& shared) {
    for (int i = 0; i < Groups * Slots_; ++i) {
      shared.ready[0][i].init(1);
      shared.written[0][i].init(4);
    }
  }

  // The i-th slab of a slot, for a pass at `place`.
  CUTLASS_DEVICE static Slab slab(uint32_t slot, Place place, int i) {
    const int along = i * kSlabColumns;
    const uint32_t address = slot + i * kSlabBytes;
    if constexpr (Transposed) return {address, place.row + along, place.column};
    return {address, place.column + along, place.row};
  }
};

// The vectors along the rows, or along the columns: their kinds, and their offsets in shared memory, where they are
// consecutive.
template <class C, bool AlongRows>
struct EpilogueVectors {
  static constexpr int kCount = AlongRows ? C::kByRow : C::kByColumn;
  static constexpr int kLength = AlongRows ? C::kGroupRows : C::kTileN;
  static constexpr int kSlot = AlongRows == C::kTransposed ? open::kColumn0 : open::kRow0;
  static constexpr int kFirstRoot = kCount - (AlongRows ? C::kRoots : C::kColumnRoots);

  int kinds[kCount], offsets[kCount], end;  // in bytes

  // epigemm_operand is called once, in one place, because each use is a call until the functor is linked.
  CUTLASS_DEVICE explicit EpilogueVectors(int begin) : end(begin) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      kinds[i] = is_root(i) ? open::kOfCompute : epigemm_operand(kSlot + i);
      offsets[i] = end;
      end += kinds[i] == open::kUnread ? 0 : kLength * static_cast<int>(sizeof(float));
    }
  }

  CUTLASS_DEVICE static constexpr bool is_root(int i) { return i >= kFirstRoot; }

  // From one number to the next.
  CUTLASS_DEVICE static int step(EpilogueParams const& params, int i) {
    if constexpr (!C::Sums::shares_roots) return 1;
    return !is_root(i) ? 1 : AlongRows ? params.row_root_step : params.column_root_step;
  }

  CUTLASS_DEVICE static const void* data(EpilogueParams const& params, int i, bool is_again) {
    if (!is_root(i)) return params.operands.data[kSlot + i];
    if constexpr (AlongRows) return is_again ? params.found_roots : params.row_roots;
    // Those of a second weight follow the first one's.
    if (i == kFirstRoot) return params.column_roots;
    return params.column_roots + static_cast<int64_t>(params.columns) * params.column_root_step;
  }
};

// How the linked functor divides a warpgroup's shared memory.
template <class C>
struct EpilogueLayout {
  const EpilogueVectors<C, /*AlongRows=*/false> by_column;
  const EpilogueVectors<C, /*AlongRows=*/true> by_row;
  const int slots;
  const bool hands_over;  // the helper brings vectors or scalars

  CUTLASS_DEVICE EpilogueLayout()
      : by_column(0),
        by_row(by_column.end),
        slots(by_row.end <= C::kVectorBytes ? C::kSlots : C::kSlots - 1),
        hands_over(by_row.end > 0 || reads_scalars()) {}

  CUTLASS_DEVICE static bool reads_scalars() {
    bool is_read = false;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < open::kScalars; ++i) is_read |= epigemm_operand(open::kScalar0 + i) != open::kUnread;
    return is_read;
  }

  CUTLASS_DEVICE char* slot(typename C::Shared& shared, int group, int index) const {
    return shared.memory[group] + index * C::kSlotBytes;
  }

  template <class Vectors>
  CUTLASS_DEVICE float* vector(typename C::Shared& shared, int group, Vectors const& vectors, int i) const {
    return reinterpret_cast<float*>(slot(shared, group, slots) + vectors.offsets[i]);
  }
};

// The slot of a pass, and how often the slot has been used.
struct SlotRing {
  int slot = 0;
  uint32_t phase = 0;

  CUTLASS_DEVICE void advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// Ordinary accesses of shared memory are not moved before it.
CUTLASS_DEVICE void wait_for(Barrier const& barrier, uint32_t phase) {
  barrier.wait(phase);
  asm volatile("" ::: "memory");
}

}  // namespace epigemm::sm90
