// The mma.sync kernel: D = epilogue(x @ weight^T) on every GPU since Ampere.
//
// - A CTA computes one tile of D. Its warps load by cp.async, a ring of stages ahead, and multiply by mma.sync from
//   registers, which ldmatrix fills one step of K ahead.
// - A CTA has the whole K of its tile, and every sum is made in the order of K: the same bits whatever M is. Where the
//   tiles are too few for the GPU, several CTAs may share the K of a tile (split_k.cuh).
// - fp32 operands are copied as they are, and rounded to TF32 in registers. Or they are fp16 slices, which were split
//   before: split_mainloop.cuh has the loop of the three products of two slices.
// - The sums leave through shared memory, a few rows at a time. A thread then has 16 bytes of a row: it reads the
//   epilogue's operands by as much, and stores it.
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

// Which results of a pass a thread finishes: 16 bytes of neighbours of some rows, always in the same columns.
template <class Config>
struct Share {
  static constexpr int kVector = Config::kVector;
  static constexpr int kVectorsOfRow = Config::tile.n / kVector;
  static constexpr int kStep = Config::tile.threads() / kVectorsOfRow;  // rows
  static constexpr int kRows = Config::tile.pass_rows() / kStep;
  static_assert(Config::tile.pass_rows() % kStep == 0, "every thread finishes as much");

  __device__ __forceinline__ int column() const { return static_cast<int>(threadIdx.x) % kVectorsOfRow * kVector; }
  __device__ __forceinline__ int row(int i) const { return static_cast<int>(threadIdx.x) / kVectorsOfRow + i * kStep; }
};

// `count`: how many of the neighbours exist.
template <class Config, class Stored>
__device__ __forceinline__ void store(Stored* out, float const (&results)[Config::kVector], int64_t count) {
  constexpr int kVector = Config::kVector;
  uint32_t words[kVectorBytes / 4];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kVectorBytes / 4; ++i) {
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
    *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
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

// What a thread knows of its columns.
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

// Neighbours of a row of sums. Of eight, the second four of every other four threads first: so the eight threads of one
// access read all banks. In the order of memory they would read half of them, twice.
template <int kVector>
__device__ __forceinline__ void read_sums(const float* from, float (&sums)[kVector]) {
  static_assert(kVector == 4 || kVector == 8);
  const auto* const fours = reinterpret_cast<const float4*>(from);
  const bool is_swapped = kVector == 8 && threadIdx.x / 4 % 2 == 1;
  const float4 one = fours[is_swapped ? 1 : 0];
  const float4 other = kVector == 8 ? fours[is_swapped ? 0 : 1] : one;
  const float4 first = is_swapped ? other : one, second = is_swapped ? one : other;
  sums[0] = first.x, sums[1] = first.y, sums[2] = first.z, sums[3] = first.w;
  if constexpr (kVector == 8) sums[4] = second.x, sums[5] = second.y, sums[6] = second.z, sums[7] = second.w;
}

// One pass: a part of the sums to `shared`, and from there through the epilogue to D. `row0`: of D, the pass's first.
template <class Config, class Sums>
__device__ __forceinline__ void finish_pass(Arguments const& p, Columns<Config> const& columns, Sums const& sums,
                                            float* shared, int row0) {
  using namespace cute;
  using Result = typename Config::Result;
  constexpr Tile tile = Config::tile;
  constexpr int kVector = Config::kVector;
  const Share<Config> share;
  const int rows = p.m - row0;
  typename Columns<Config>::Epilogue::Row of_rows[Share<Config>::kRows];
  float roots[Share<Config>::kRows];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Share<Config>::kRows; ++i) {
    if (share.row(i) >= rows) continue;
    of_rows[i] = columns.epilogue.row(row0 + share.row(i));
    if constexpr (Config::kIsOnSlices) roots[i] = p.x.roots[row0 + share.row(i)];
  }

  const auto shape = Shape<Int<tile.pass_rows()>, Int<tile.n>>{};
  Tensor places = typename Config::TiledMma{}.get_slice(threadIdx.x).partition_C(make_identity_tensor(shape));
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(sums); i += 2) {  // two neighbours of a row
    float* const to = shared + get<0>(places(i)) * tile.sums_stride() + get<1>(places(i));
    *reinterpret_cast<float2*>(to) = make_float2(sums(i), sums(i + 1));
  }
  __syncthreads();
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Share<Config>::kRows; ++i) {
    const int row = share.row(i);
    if (row >= rows || columns.first >= p.n) continue;
    const float* const from = shared + row * tile.sums_stride() + share.column();
    float of_row[kVector], results[kVector];
    read_sums<kVector>(from, of_row);
    if constexpr (Config::kIsOnSlices) columns.roots.rescale(roots[i], of_row);
    columns.epilogue.apply(of_row, of_rows[i], results);
    store<Config>(static_cast<Result*>(p.out) + (row0 + row) * p.out_row_stride + columns.first, results,
                  p.n - columns.first);
  }
}

// --- the kernel ----------------------------------------------------------------------------------------------------

// Grid: tiles, and the shares of each tile's K.
template <class Config>
__device__ __forceinline__ void run(Arguments const& p) {
  using namespace cute;
  constexpr Tile tile = Config::tile;
  extern __shared__ __align__(128) char memory[];
  Tensor sums = partition_fragment_C(typename Config::TiledMma{}, Shape<Int<tile.m>, Int<tile.n>>{});
  const Place loaded = place_of(p.order, tile_number());
  const ShareOfK k = share_of_k<Config>(p);
  Ring<Config> ring(p, loaded.m * tile.m, loaded.n * tile.n, k, reinterpret_cast<typename Config::Element*>(memory));
  if constexpr (Config::inputs == Inputs::Split) {
    multiply_slices<Config>(ring, k.length, sums);
  } else {
    multiply<Config>(ring, k.length, sums);
  }
  if constexpr (tile.may_split()) {
    if (p.division.splits > 1 && !add_shares<Config>(p, sums)) return;
  }

  __syncthreads();  // all stages have been read
  const Place finished = place_of(p.order, tile_number());
  const int m0 = finished.m * tile.m;
  const Columns<Config> columns(p, finished.n * tile.n + Share<Config>{}.column());
  auto* const shared = reinterpret_cast<float*>(memory);
  CUTLASS_PRAGMA_UNROLL
  for (int pass = 0; pass < size<1>(sums); ++pass) {
    // Where a pass is written, the one before the last has been read: a barrier of the last one's lies between.
    float* const of_pass = shared + pass % 2 * (tile.pass_bytes() / 4);
    finish_pass<Config>(p, columns, sums(_, pass, _), of_pass, m0 + pass * tile.pass_rows());
  }
}

}  // namespace epigemm::sm80_mma
