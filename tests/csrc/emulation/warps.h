// Kernels under a C++ compiler: the threads of a CTA as fibers, and the instructions that mma.sync kernels take.
//
// A fiber runs until a barrier or an instruction of its whole warp, so what races on a GPU is seen here only as far as
// copies are late: cp.async copies nothing before it is waited for. Include it before the kernel's headers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_types.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "emulation/fibers.h"

#include "cute/tensor.hpp"
#include "cute/atom/mma_atom.hpp"

namespace emulation {

constexpr int kWarp = 32;

struct Copy {
  const void* from;
  void* to;
  bool is_there;
};

// What the lanes of a warp have given to an instruction.
struct Posted {
  int arrived = 0, generation = 0;
  const void* addresses[kWarp];
  uint32_t a[kWarp][4], b[kWarp][2], loaded[kWarp][4];
  float c[kWarp][4];
};

struct Copies {
  std::vector<std::vector<Copy>> groups;  // that were fenced, the oldest first
  std::vector<Copy> open;                 // copies behind the last fence
};

// What the instructions of a CTA keep.
struct Kept {
  std::vector<Copies> copies;
  std::vector<Posted> warps;
  bool is_any_true = false;  // of what the threads give to __syncthreads_or
};

inline Kept* kept = nullptr;

inline Copies& copies() { return kept->copies[cta->current]; }
inline Posted& warp() { return kept->warps[cta->current / kWarp]; }
inline int lane() { return cta->current % kWarp; }

inline void run_cta(int threads, ThreadIndex place, int first, std::function<void()> body) {
  Kept made;
  made.copies.resize(threads);
  made.warps.resize(threads / kWarp);
  kept = &made;
  run_fibers(threads, place, first, std::move(body));
  for (const Copies& each : made.copies) {
    if (!each.open.empty()) std::abort();  // a copy that nobody waits for
  }
}

// --- instructions --------------------------------------------------------------------------------------------------

struct LoadMatrix {
  using SRegisters = cute::uint128_t[1];
  using DRegisters = uint32_t[4];

  static void copy(cute::uint128_t const& from, uint32_t& d0, uint32_t& d1, uint32_t& d2, uint32_t& d3) {
    Posted& w = warp();
    w.addresses[lane()] = &from;
    meet(w.arrived, w.generation, kWarp, [&] {
      for (int l = 0; l < kWarp; ++l) {
        for (int matrix = 0; matrix < 4; ++matrix) {
          std::memcpy(&w.loaded[l][matrix], static_cast<const char*>(w.addresses[8 * matrix + l / 4]) + 4 * (l % 4), 4);
        }
      }
    });
    const uint32_t* const loaded = w.loaded[lane()];
    d0 = loaded[0], d1 = loaded[1], d2 = loaded[2], d3 = loaded[3];
  }
};

inline float value_of(uint32_t pair, int i, cute::bfloat16_t) {
  const uint32_t bits = i ? pair & 0xffff0000u : pair << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float value_of(uint32_t pair, int i, cute::half_t) {
  return static_cast<float>(cute::half_t::bitcast(static_cast<uint16_t>(pair >> 16 * i)));
}

// An operand of TF32 has its last 13 bits cut off by the instruction: here they are to be zeros.
inline float value_of(uint32_t bits, int, cute::tfloat32_t) {
  if (bits & 0x1fffu && (bits & 0x7fffffffu) != 0x7fffffffu) std::printf("not rounded to TF32\n"), std::exit(1);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// mma.sync, row by column: m16n8k16 in 16 bits, m16n8k8 in TF32.
template <class Element>
struct Multiply {
  static constexpr int kOfRegister = 4 / sizeof(Element), kColumns = 8 * kOfRegister;

  using DRegisters = float[4];
  using ARegisters = uint32_t[4];
  using BRegisters = uint32_t[2];
  using CRegisters = float[4];

  static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t const& a0, uint32_t const& a1,
                  uint32_t const& a2, uint32_t const& a3, uint32_t const& b0, uint32_t const& b1, float const& c0,
                  float const& c1, float const& c2, float const& c3) {
    Posted& w = warp();
    const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    const float c[4] = {c0, c1, c2, c3};
    std::copy_n(a, 4, w.a[lane()]), std::copy_n(b, 2, w.b[lane()]), std::copy_n(c, 4, w.c[lane()]);
    meet(w.arrived, w.generation, kWarp, [&] { multiply(w); });
    const float* const sums = w.c[lane()];
    d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
  }

  static void multiply(Posted& w) {
    float left[16][kColumns], right[8][kColumns];
    for (int l = 0; l < kWarp; ++l) {
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < kOfRegister; ++j) {
          const int k = kOfRegister * (l % 4 + 4 * (i / 2)) + j;
          left[l / 4 + 8 * (i % 2)][k] = value_of(w.a[l][i], j, Element{});
          if (i % 2 == 0) right[l / 4][k] = value_of(w.b[l][i / 2], j, Element{});
        }
      }
    }
    for (int l = 0; l < kWarp; ++l) {
      for (int i = 0; i < 4; ++i) {
        const int row = l / 4 + 8 * (i / 2), column = 2 * (l % 4) + i % 2;
        for (int k = 0; k < kColumns; ++k) w.c[l][i] += left[row][k] * right[column][k];
      }
    }
  }
};
struct MultiplyHalf : Multiply<cute::half_t> {};
struct MultiplyBFloat16 : Multiply<cute::bfloat16_t> {};
struct MultiplyTF32 : Multiply<cute::tfloat32_t> {};

// 16 bytes, or zeros; not before it is waited for.
template <class Source, class Target = Source>
struct CopyLater {
  static void copy(Source const& from, Target& to, bool is_there) { copies().open.push_back({&from, &to, is_there}); }
};

inline void fence() {
  copies().groups.push_back(std::move(copies().open));
  copies().open.clear();
}

template <int N>
void wait() {
  auto& groups = copies().groups;
  while (static_cast<int>(groups.size()) > N) {
    for (const Copy& copy : groups.front()) {
      if (copy.is_there)
        std::memcpy(copy.to, copy.from, 16);
      else
        std::memset(copy.to, 0, 16);
    }
    groups.erase(groups.begin());
  }
}

}  // namespace emulation

namespace cute {
template <>
struct Copy_Traits<emulation::LoadMatrix> : Copy_Traits<SM75_U32x4_LDSM_N> {};
template <>
struct MMA_Traits<emulation::MultiplyHalf> : MMA_Traits<SM80_16x8x16_F32F16F16F32_TN> {};
template <>
struct MMA_Traits<emulation::MultiplyBFloat16> : MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN> {};
template <>
struct MMA_Traits<emulation::MultiplyTF32> : MMA_Traits<SM80_16x8x8_F32TF32TF32F32_TN> {};
using emulation::CopyLater;
using emulation::LoadMatrix;
using emulation::MultiplyBFloat16;
using emulation::MultiplyHalf;
using emulation::MultiplyTF32;
inline void emulated_fence() { emulation::fence(); }
template <int N>
void emulated_wait() {
  emulation::wait<N>();
}
}  // namespace cute

#define SM75_U32x4_LDSM_N LoadMatrix
#define SM80_16x8x16_F32F16F16F32_TN MultiplyHalf
#define SM80_16x8x16_F32BF16BF16F32_TN MultiplyBFloat16
#define SM80_16x8x8_F32TF32TF32F32_TN MultiplyTF32
#define SM80_CP_ASYNC_CACHEGLOBAL_ZFILL CopyLater
#define cp_async_fence emulated_fence
#define cp_async_wait emulated_wait

inline bool __syncthreads_or(bool is_true) {
  emulation::kept->is_any_true |= is_true;
  __syncthreads();
  const bool is_any_true = emulation::kept->is_any_true;
  __syncthreads();
  emulation::kept->is_any_true = false;
  return is_any_true;
}

inline void __threadfence() {}
inline int atomicAdd(int* to, int value) {
  const int before = *to;
  *to += value;
  return before;
}
inline void __stcg(float4* to, float4 value) { *to = value; }
inline float4 __ldcg(const float4* from) { return *from; }

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
