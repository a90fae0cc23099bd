#include "device/tensor_rate.h"

#include <cmath>

#include "device/launch.h"

namespace epigemm::cuda {
namespace {

constexpr int kThreads = 256, kCtasOfMultiprocessor = 2;  // 16 warps: four for each tensor core
constexpr int kTiles = 8;                                 // of one warp: sums that do not wait for each other

// The instructions have the same registers: four of x, two of the weight, four sums.
enum class Multiplied { BF16, TF32 };

constexpr int64_t flops_of(Multiplied type) { return 2 * 16 * 8 * (type == Multiplied::BF16 ? 16 : 8); }

template <Multiplied kType>
__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&x)[4], const unsigned (&weight)[2]) {
  if constexpr (kType == Multiplied::BF16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(weight[0]), "r"(weight[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(weight[0]), "r"(weight[1]));
  }
}

// Two bf16 numbers, or a TF32 one, of magnitude 0.5 to 1 with every mantissa: multiplying zeros takes less power, and
// clocks stay high.
template <Multiplied kType>
__device__ __forceinline__ unsigned numbers(unsigned seed) {
  seed = seed * 1664525u + 1013904223u;
  return kType == Multiplied::BF16 ? (seed & 0x807f807fu) | 0x3f003f00u : (seed & 0x807fe000u) | 0x3f000000u;
}

template <Multiplied kType>
__global__ void __launch_bounds__(kThreads) multiply_steps(int steps, float* out) {
  const unsigned thread = blockIdx.x * kThreads + threadIdx.x;
  unsigned x[4], weight[kTiles][2];
  float sums[kTiles][4] = {};
  for (int i = 0; i < 4; ++i) x[i] = numbers<kType>(4 * thread + i);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    for (int i = 0; i < 2; ++i) weight[tile][i] = numbers<kType>(~(2 * kTiles * thread + 2 * tile + i));
  }
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) multiply<kType>(sums[tile], x, weight[tile]);
  }
  float sum = 0;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) sum += sums[tile][0] + sums[tile][1] + sums[tile][2] + sums[tile][3];
  if (!isfinite(sum)) *out = sum;  // never: so that the sums are needed
}

template <Multiplied kType>
const char* enqueue(int steps, float* sums, int multiprocessors, int device, void* stream, int64_t* flops) {
  const int ctas = kCtasOfMultiprocessor * multiprocessors;
  *flops = flops_of(kType) * kTiles * (kThreads / 32) * ctas * steps;
  void* parameters[] = {&steps, &sums};
  const LaunchShape shape{{static_cast<unsigned>(ctas), 1, 1}, {kThreads, 1, 1}, {1, 1, 1}, 0, device, stream, false};
  return launch<multiply_steps<kType>>(shape, parameters);
}

}  // namespace

const char* multiply_bare(int steps, bool is_tf32, float* sums, int multiprocessors, int device, void* stream,
                          int64_t* flops) {
  const auto& of_type = is_tf32 ? enqueue<Multiplied::TF32> : enqueue<Multiplied::BF16>;
  return of_type(steps, sums, multiprocessors, device, stream, flops);
}

}  // namespace epigemm::cuda
