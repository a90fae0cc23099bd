// The mainloop of one product: 16 bits, TF32, or one fp16 slice.
#pragma once

#include "gemm/sm80_mma/ring.cuh"

namespace epigemm::sm80_mma {

// To the nearest TF32, ties away from zero: what the instruction leaves of an fp32 number else is cut off.
__device__ __forceinline__ uint32_t rounded_to_tf32(uint32_t bits) {
#ifdef __CUDA_ARCH__
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
#else  // under a C++ compiler
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return is_nan ? 0x7fffffffu : (bits + 0x1000u) & 0xffffe000u;
#endif
}

template <class Fragment>
__device__ __forceinline__ void round_fragment(Fragment&& fragment) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < cute::size(fragment); ++i) {
    auto& bits = reinterpret_cast<uint32_t&>(fragment(i));
    bits = rounded_to_tf32(bits);
  }
}

// The sums of the CTA's share of K, whose length is `k`.
template <class Config, class Sums>
__device__ __forceinline__ void multiply(Ring<Config>& ring, int k, Sums& sums) {
  using namespace cute;
  const int steps = (k + Config::tile.k - 1) / Config::tile.k;
  with_fragments(ring, [&](auto& mma, auto& of_x, auto& of_weight, auto const& read_x, auto const& read_weight) {
    constexpr int kParts = size<2>(remove_cvref_t<decltype(of_x)>{});  // of a stage: one instruction's K each
    static_assert(kParts > 1, "one is read while another is multiplied");
    const auto read = [&](int part, int stage) { read_x(_, part, stage), read_weight(_, part, stage); };

    int reading = 0;
    clear(sums);
    ring.wait();
    read(0, reading);
    int step = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    do {  // once at least: without a branch around it the sums stay in their registers
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kParts; ++part) {
        if (part == kParts - 1) {
          ring.finish(ring.free(reading));
          ring.wait();
          reading = ring.next(reading);
        }
        read((part + 1) % kParts, reading);
        if (part == 0) ring.begin(ring.free(reading));
        if constexpr (Config::inputs == Inputs::TF32) {
          round_fragment(of_x(_, _, part));
          round_fragment(of_weight(_, _, part));
        }
        gemm(mma, of_x(_, _, part), of_weight(_, _, part), sums);
      }
    } while (++step < steps);
  });
  if constexpr (Ring<Config>::kIsByVectors) cp_async_wait<0>();
}

}  // namespace epigemm::sm80_mma
