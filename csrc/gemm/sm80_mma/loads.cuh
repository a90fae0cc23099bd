// A thread's part of the loads of one operand, stage by stage: from rows in memory to a stage of shared memory.
#pragma once

#include "cute/arch/copy_sm80.hpp"
#include "cute/tensor.hpp"
#include "gemm/sm80_mma/arguments.h"
#include "gemm/sm80_mma/tiles.h"

namespace epigemm::sm80_mma {

// Elements beyond the last row or the end of K are zeros. `kRows`: rows of the tile. `Layout`: of all stages.
template <class Element, class OfTile, int kRows, class Layout>
class Loader {
  static constexpr Tile tile = OfTile::tile;
  static constexpr int kVector = tile.vector();
  static constexpr int kVectorsOfRow = tile.k / kVector;
  static constexpr int kRowsAtOnce = tile.threads() / kVectorsOfRow;
  static constexpr int kCount = kRows / kRowsAtOnce;  // vectors of this thread
  static_assert(kRows % kRowsAtOnce == 0, "every thread loads as much");
  static_assert(kRowsAtOnce % 8 == 0, "the swizzle repeats after eight rows: a thread's vectors lie alike");

 public:
  // `first`: the tile's first row; `rows`: of the whole matrix.
  __device__ __forceinline__ Loader(Rows const& from, int first, int rows, int k)
      : k_(k), column_(static_cast<int>(threadIdx.x) % kVectorsOfRow * kVector) {
    const int row = static_cast<int>(threadIdx.x) / kVectorsOfRow;
    from_ = static_cast<const Element*>(from.data) + (first + row) * from.stride + column_;
    step_ = kRowsAtOnce * from.stride;
    rows_ = rows - first - row;
    to_ = Layout{}(row, column_, 0);
  }

  // Starts the copy of the next columns of K to a stage of `shared`; cp_async_fence and cp_async_wait follow it.
  __device__ __forceinline__ void start(Element* shared, int stage) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      using Copy = cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>;
      Copy::copy(*reinterpret_cast<const cute::uint128_t*>(from_ + i * step_), vector_of(shared, stage, i),
                 column_ < k_ && i * kRowsAtOnce < rows_);
    }
    advance();
  }

  // The same by elements: `fetch` starts the loads, and `put` stores the loaded elements.
  __device__ __forceinline__ void fetch() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kVector; ++j) {
        const bool is_inside = column_ + j < k_ && i * kRowsAtOnce < rows_;
        fetched_[i].elements[j] = is_inside ? from_[i * step_ + j] : Element(0);
      }
    }
    advance();
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

  __device__ __forceinline__ cute::uint128_t& vector_of(Element* shared, int stage, int i) const {
    Element* const place = shared + to_ + (stage * kRows + i * kRowsAtOnce) * tile.k;
    return *reinterpret_cast<cute::uint128_t*>(place);
  }

  __device__ __forceinline__ void advance() {
    from_ += tile.k;
    k_ -= tile.k;
  }

  const Element* from_;  // this thread's first vector of the next stage
  int64_t step_;         // elements from one of its vectors to the next
  int rows_;             // from its first row on
  int k_;                // columns that are left
  int column_, to_;      // within a stage
  Vector fetched_[tile.loads == Loads::Elements ? kCount : 1];
};

}  // namespace epigemm::sm80_mma
