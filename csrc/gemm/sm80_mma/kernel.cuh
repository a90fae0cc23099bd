// The mma.sync kernel: D = epilogue(x @ weight^T) on every GPU since Ampere.
//
// - A CTA computes a tile of D, then perhaps further ones. Its warps load by cp.async, a ring of stages ahead, and
//   multiply by mma.sync from registers, which ldmatrix fills one step of K ahead.
// - A CTA has the whole K of its tile, and every sum is made in the order of K: the same bits whatever M is. Where the
//   tiles are too few for the GPU, several CTAs may share the K of a tile (split_k.cuh).
// - fp32 operands are copied as they are, and rounded to TF32 in registers. Or they are fp16 slices, which were split
//   before: split_mainloop.cuh has the loop of the three products of two slices.
// - The weight's rows lie in shared memory in an order that gives a thread sums of neighbours in D, 16 bytes of a row
//   (config.cuh). They stay in its registers: it reads the epilogue's operands by as much, and stores it.
#pragma once

#include <type_traits>

#include "device/types.cuh"
#include "gemm/fp16_slices/rescale.h"
#include "gemm/sm80_mma/mainloop.cuh"
#include "gemm/sm80_mma/split_k.cuh"
#include "gemm/sm80_mma/split_mainloop.cuh"
#include "open/epilogue.cuh"

namespace epigemm::sm80_mma {

// A CTA's tile of D, by its number.
struct Place {
  int m, n;
};

__device__ __forceinline__ Place place_of(Order const& order, int number) {
  const int strip = number / (order.width * order.walked);
  const int width = min(order.width, order.across - strip * order.width);
  const int within = number - strip * order.width * order.walked;
  const int walked = within / width, across = strip * order.width + within % width;
  return order.is_along_m ? Place{walked, across} : Place{across, walked};
}

// --- finishing -----------------------------------------------------------------------------------------------------

// `count`: how many of the neighbours exist.
template <class Config, class Stored>
__device__ __forceinline__ void store(Stored* out, float const (&results)[Config::kVector], int64_t count) {
  constexpr int kVector = Config::kVector, kWords = kVector * sizeof(Stored) / 4;
  using Vector = std::conditional_t<kWords == 4, uint4, uint2>;
  static_assert(kWords * 4 == sizeof(Vector), "one store");
  alignas(Vector) uint32_t words[kWords];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kWords; ++i) {
    if constexpr (sizeof(Stored) == 4) {
      words[i] = reinterpret_cast<uint32_t const&>(results[i]);
    } else {
      Stored pair[2];
      cuda::from_compute_pair<Stored>(results + 2 * i, pair);
      words[i] = reinterpret_cast<uint32_t const&>(pair);
    }
  }
  const bool is_aligned = Config::tile.loads == Loads::Vectors || reinterpret_cast<uintptr_t>(out) % sizeof(words) == 0;
  if (is_aligned && count >= kVector) {
    *reinterpret_cast<Vector*>(out) = reinterpret_cast<Vector const&>(words);
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) {
      if (i < count) out[i] = reinterpret_cast<Stored const*>(words)[i];
    }
  }
}

// The roots of the scales of a thread's columns, which are rows of the weight. Of slices alone.
template <class Config>
struct ColumnRoots {
  float roots[Config::kVector];

  __device__ __forceinline__ ColumnRoots(Arguments const& p, int64_t column) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kVector; ++i) roots[i] = column + i < p.n ? p.weight.roots[column + i] : 0.0f;
  }

  __device__ __forceinline__ void rescale(float root_of_row, float (&sums)[Config::kVector]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kVector; ++i) sums[i] = fp16_slices::rescale(root_of_row, roots[i], sums[i]);
  }
};
struct NoRoots {
  __device__ __forceinline__ NoRoots(Arguments const&, int64_t) {}
};

// What a thread knows of a vector of columns.
template <class Config>
struct Columns {
  using Epilogue = open::Epilogue<typename Config::Result, Config::kVector, open::Access::Unknown>;
  using Roots = std::conditional_t<Config::kIsOnSlices, ColumnRoots<Config>, NoRoots>;

  int64_t first;
  Epilogue epilogue;
  Roots roots;

  __device__ __forceinline__ Columns(Arguments const& p, int64_t column)
      : first(column), epilogue(p.operands, column < p.n ? column : 0, p.n), roots(p, column) {}
};

// The epilogue of a thread's sums, ((columns, rows) of an instruction, rows, columns): vector by vector of columns, and
// of each two rows at a time, whose operands are read at once: of more there are no registers beside all sums. `m0`,
// `n0`: the tile's first row and column.
template <class Config, class Sums>
__device__ __forceinline__ void finish(Arguments const& p, Sums const& sums, int m0, int n0) {
  using namespace cute;
  using Result = typename Config::Result;
  constexpr Tile tile = Config::tile;
  constexpr int kVector = Config::kVector, kPairs = kVector / 2, kVectors = size<2>(Sums{}) / kPairs;
  constexpr int kRows = 2 * size<1>(Sums{}), kAtOnce = 2;
  static_assert(kRows % kAtOnce == 0, "whole groups of rows");
  const auto shape = Shape<Int<tile.m>, Int<tile.n>>{};
  Tensor places = typename Config::TiledMma{}.get_slice(threadIdx.x).partition_C(make_identity_tensor(shape));
  CUTLASS_PRAGMA_UNROLL
  for (int vector = 0; vector < kVectors; ++vector) {
    const int place = get<1>(places(0, 0, vector * kPairs));
    const Columns<Config> columns(p, n0 + Config::OrderOfWeight::row(place));
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kRows; first += kAtOnce) {
      int rows[kAtOnce];
      typename Columns<Config>::Epilogue::Row of_rows[kAtOnce];
      float roots[kAtOnce];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        rows[i] = m0 + get<0>(places(make_coord(0, (first + i) % 2), (first + i) / 2, 0));
        if (rows[i] >= p.m) continue;
        of_rows[i] = columns.epilogue.row(rows[i]);
        if constexpr (Config::kIsOnSlices) roots[i] = p.x.roots[rows[i]];
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        if (rows[i] >= p.m || columns.first >= p.n) continue;
        float of_row[kVector], results[kVector];
        CUTLASS_PRAGMA_UNROLL
        for (int column = 0; column < kVector; ++column) {
          const auto of_instruction = make_coord(column % 2, (first + i) % 2);
          of_row[column] = sums(of_instruction, (first + i) / 2, vector * kPairs + column / 2);
        }
        if constexpr (Config::kIsOnSlices) columns.roots.rescale(roots[i], of_row);
        columns.epilogue.apply(of_row, of_rows[i], results);
        store<Config>(static_cast<Result*>(p.out) + rows[i] * p.out_row_stride + columns.first, results,
                      p.n - columns.first);
      }
    }
  }
}

// --- the kernel ----------------------------------------------------------------------------------------------------

// The ring of a tile, with its first stages on their way.
template <class Config>
__device__ __forceinline__ Ring<Config> ring_of(Arguments const& p, int number, ShareOfK const& k) {
  extern __shared__ __align__(128) char memory[];
  const Place place = place_of(p.order, number);
  Ring<Config> ring(p, place.m * Config::tile.m, place.n * Config::tile.n, k,
                    reinterpret_cast<typename Config::Element*>(memory));
  ring.fill();
  return ring;
}

// Grid: tiles, or fewer CTAs, of which each then computes several tiles; and the shares of each tile's K, with as many
// CTAs as tiles. A tile's first stages are loaded during the epilogue of the one before.
template <class Config>
__device__ __forceinline__ void run(Arguments const& p) {
  using namespace cute;
  constexpr Tile tile = Config::tile;
  const int tiles = p.order.walked * p.order.across;
  const ShareOfK k = share_of_k<Config>(p);
  Ring<Config> ring = ring_of<Config>(p, tile_number(), k);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int number = tile_number(); number < tiles;) {
    Tensor sums = partition_fragment_C(typename Config::TiledMma{}, Shape<Int<tile.m>, Int<tile.n>>{});
    if constexpr (Config::inputs == Inputs::Split) {
      multiply_slices<Config>(ring, k.length, sums);
    } else {
      multiply<Config>(ring, k.length, sums);
    }
    if constexpr (tile.may_split()) {
      if (p.division.splits > 1 && !add_shares<Config>(p, sums)) return;
    }
    const int next = number + tiles_at_once();
    if (next < tiles) {
      __syncthreads();  // all stages have been read
      ring = ring_of<Config>(p, next, k);
    }
    const Place finished = place_of(p.order, number);
    finish<Config>(p, sums, finished.m * tile.m, finished.n * tile.n);
    number = next;
  }
}

}  // namespace epigemm::sm80_mma
