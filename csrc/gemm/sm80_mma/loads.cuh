// A thread's part of the loads of one operand, stage by stage: from rows in memory to a stage of shared memory.
#pragma once

#include "cute/arch/copy_sm80.hpp"
#include "cute/tensor.hpp"
#include "gemm/fp16_slices/layout.h"
#include "gemm/sm80_mma/arguments.h"
#include "gemm/sm80_mma/tiles.h"

namespace epigemm::sm80_mma {

// Elements beyond the last row or the end of K are zeros. `kRows`: rows of the tile. `Layout`: of all stages. `Order`:
// of the rows in a stage (config.cuh).
template <class Element, class OfTile, int kRows, class Layout, class Order>
class Loader {
  static constexpr Tile tile = OfTile::tile;
  static constexpr int kVector = tile.vector();
  static constexpr int kVectorsOfRow = tile.columns() / kVector;  // of a slice
  static constexpr int kRowsAtOnce = tile.threads() / kVectorsOfRow;
  static constexpr int kCount = kRows / kRowsAtOnce;  // vectors of this thread, of each slice
  static_assert(kRows % kRowsAtOnce == 0, "every thread loads as much");
  static_assert(kRowsAtOnce % 8 == 0, "the swizzle repeats after eight rows: a thread's vectors lie alike");

 public:
  // `first`: the tile's first row; `rows`: of the whole matrix; `first_k`: where in the rows it begins.
  __device__ __forceinline__ Loader(Rows const& from, int first, int rows, int first_k)
      : column_(static_cast<int>(threadIdx.x) % kVectorsOfRow * kVector) {
    const int place = static_cast<int>(threadIdx.x) / kVectorsOfRow, row = first + Order::row(place);
    from_ = static_cast<const Element*>(from.data) + row * from.stride + first_k + column_;
    stride_ = from.stride;
    rows_ = rows - row;
    to_ = Layout{}(place, column_, 0);
  }

  // Starts the copy of the next columns of K to a stage of `shared`; cp_async_fence and cp_async_wait follow it.
  // `left`: how many columns of the CTA's share of K have not been loaded.
  __device__ __forceinline__ void start(Element* shared, int stage, int left) {
    const bool is_column_inside = tile.slices > 1 || column_ < left;  // rows of two slices are whole stages
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int slice = 0; slice < tile.slices; ++slice) {
        using Copy = cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>;
        const Element* const from = from_ + row_of(i) * stride_ + slice * fp16_slices::kInterleave;
        Copy::copy(*reinterpret_cast<const cute::uint128_t*>(from), vector_of(shared, stage, i, slice),
                   is_column_inside && row_of(i) < rows_);
      }
    }
    advance(left);
  }

  // The same by elements: `fetch` starts the loads, and `put` stores the loaded elements.
  __device__ __forceinline__ void fetch(int left) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kVector; ++j) {
        const bool is_inside = column_ + j < left && row_of(i) < rows_;
        fetched_[i].elements[j] = is_inside ? from_[row_of(i) * stride_ + j] : Element(0);
      }
    }
    advance(left);
  }
  __device__ __forceinline__ void put(Element* shared, int stage) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      vector_of(shared, stage, i) = reinterpret_cast<cute::uint128_t const&>(fetched_[i]);
    }
  }

 private:
  struct alignas(16) Vector {
    Element elements[kVector];
  };

  // The row of a vector, counted from that of the first one.
  static constexpr __host__ __device__ int row_of(int i) { return Order::row(i * kRowsAtOnce); }

  __device__ __forceinline__ cute::uint128_t& vector_of(Element* shared, int stage, int i, int slice = 0) const {
    Element* const place = shared + to_ + ((stage * tile.slices + slice) * kRows + i * kRowsAtOnce) * tile.columns();
    return *reinterpret_cast<cute::uint128_t*>(place);
  }

  // In memory a row has blocks of 64 hi and 64 lo. A stage has the first half of both, or the second.
  __device__ __forceinline__ void advance(int left) {
    constexpr int kBlock = 2 * fp16_slices::kInterleave;
    static_assert(tile.slices == 1 || 4 * tile.columns() == kBlock);
    from_ += tile.slices == 1 || left % kBlock == 0 ? tile.columns() : kBlock - tile.columns();
  }

  const Element* from_;  // this thread's first vector of the next stage
  int64_t stride_;       // of the rows, in elements
  int rows_;             // from its first row on
  int column_, to_;      // within a stage
  Vector fetched_[tile.loads == Loads::Elements ? kCount : 1];
};

}  // namespace epigemm::sm80_mma
