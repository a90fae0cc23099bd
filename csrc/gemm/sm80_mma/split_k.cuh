// CTAs that share the K of a tile: which part is a CTA's, and how the sums of the parts become those of the tile.
//
// Every CTA writes its sums to a workspace. The one that comes last adds them all in the order of the parts, its own
// among them, and goes on to the epilogue: two calls give the same bits, whichever CTA comes last. No CTA waits for
// another, so it does not matter how many run at once.
#pragma once

#include "gemm/sm80_mma/ring.cuh"

namespace epigemm::sm80_mma {

// A CTA's first tile, the tiles that are computed at once, and the CTA's part of K. They are read anew at each call, so
// that they take no registers while a loop runs that does not need them.
__device__ __forceinline__ int tile_number() {
#ifdef __CUDA_ARCH__
  int number;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(number));
  return number;
#else
  return static_cast<int>(blockIdx.x);
#endif
}
__device__ __forceinline__ int tiles_at_once() {
#ifdef __CUDA_ARCH__
  int number;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(number));
  return number;
#else
  return static_cast<int>(gridDim.x);
#endif
}
__device__ __forceinline__ int share_number() {
#ifdef __CUDA_ARCH__
  int number;
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(number));
  return number;
#else
  return static_cast<int>(blockIdx.y);
#endif
}

template <class Config>
__device__ __forceinline__ ShareOfK share_of_k(Arguments const& p) {
  constexpr Tile tile = Config::tile;
  if constexpr (!tile.may_split()) {
    return {0, p.k};
  } else {
    constexpr int kUnit = tile.slices * tile.k;
    const int share = share_number();
    const int first = (share * p.division.units + min(share, p.division.longer)) * kUnit;
    const int units = p.division.units + (share < p.division.longer ? 1 : 0);
    return {first, min(units * kUnit, p.k - first)};
  }
}

// Writes a thread's sums. Neighbouring threads write neighbouring vectors.
template <class Config, class Sums>
__device__ __forceinline__ void write_sums(float4* to, Sums const& sums) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < cute::size(sums) / 4; ++i) {
    const float4 vector = make_float4(sums(4 * i), sums(4 * i + 1), sums(4 * i + 2), sums(4 * i + 3));
    __stcg(to + i * Config::tile.threads(), vector);
  }
}

// Adds what the CTAs of a tile have written, a part of a thread's sums after the other: read at once, they would take
// more registers than the mainloop.
template <class Config, class Sums>
__device__ __forceinline__ void add_written(const float4* from, int splits, Sums& sums) {
  constexpr int kVectors = cute::size(Sums{}) / 4, kAtOnce = kVectors < 8 ? kVectors : 8;
  constexpr int kThreads = Config::tile.threads();
  static_assert(cute::size(Sums{}) % 4 == 0 && kVectors % kAtOnce == 0, "whole vectors, and whole parts");
  cute::clear(sums);
  CUTLASS_PRAGMA_UNROLL
  for (int first = 0; first < kVectors; first += kAtOnce) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int share = 0; share < splits; ++share) {
      const float4* const of_share = from + (share * kVectors + first) * kThreads;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const float4 read = __ldcg(of_share + i * kThreads);  // from L2: L1 does not see what other CTAs write
        const int to = 4 * (first + i);
        sums(to) += read.x, sums(to + 1) += read.y, sums(to + 2) += read.z, sums(to + 3) += read.w;
      }
    }
  }
}

// Whether this CTA is the last of its tile. Then `sums` are those of the whole K. For all threads together.
template <class Config, class Sums>
__device__ __forceinline__ bool add_shares(Arguments const& p, Sums& sums) {
  constexpr int kOfTile = Config::tile.m * Config::tile.n;
  const int splits = p.division.splits;
  float* const written = p.division.sums + static_cast<int64_t>(tile_number()) * splits * kOfTile;
  auto* const of_thread = reinterpret_cast<float4*>(written) + threadIdx.x;
  write_sums<Config>(of_thread + share_number() * (kOfTile / 4), sums);
  __threadfence();  // each thread's sums are written before its CTA is counted
  __syncthreads();
  const bool is_counted_last = threadIdx.x == 0 && atomicAdd(p.division.arrived + tile_number(), 1) == splits - 1;
  if (!__syncthreads_or(is_counted_last)) return false;
  __threadfence();  // and read after all were counted
  add_written<Config>(of_thread, splits, sums);
  return true;
}

}  // namespace epigemm::sm80_mma
