#include "elementwise/quantise.h"

#include <cuda_fp8.h>

#include "device/launch.h"
#include "device/types.cuh"

namespace epigemm {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements that a thread reads at once
constexpr int kBlockColumns = 128;
constexpr int kBlockThreads = kBlockColumns / kVector;
constexpr int kBlocksOfCta = kThreads / kBlockThreads;
constexpr int kRowsOfCta = 8;  // whose scales of one block lie in 32 bytes

// The larger one, or NaN if one of them is.
__device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }

template <class Element>
__device__ __forceinline__ void read(const Element* from, float (&to)[kVector]) {
  alignas(16) Element elements[kVector];
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(elements) / sizeof(uint4)); ++i) {
    reinterpret_cast<uint4*>(elements)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
#pragma unroll
  for (int i = 0; i < kVector; i += 2) cuda::to_compute_pair(elements + i, to + i);
}

__device__ __forceinline__ float largest_of(const float (&numbers)[kVector]) {
  float largest = 0;
#pragma unroll
  for (const float number : numbers) largest = larger(fabsf(number), largest);
  return largest;
}

// Of so many neighbouring lanes.
template <int Lanes>
__device__ __forceinline__ float largest_of_lanes(float largest) {
#pragma unroll
  for (int apart = Lanes / 2; apart > 0; apart /= 2) largest = larger(largest, __shfl_xor_sync(~0u, largest, apart));
  return largest;
}

__device__ __forceinline__ float scale_of(float largest) {
  constexpr float kLeast = 0x1p-100f, kLargestE4M3 = 448;
  return __fdiv_rn(largest < kLeast ? kLeast : largest, kLargestE4M3);
}

__device__ __forceinline__ void write(const float (&numbers)[kVector], float scale, uint8_t* to) {
  alignas(8) __nv_fp8x2_storage_t pairs[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    const float2 pair{__fdiv_rn(numbers[i], scale), __fdiv_rn(numbers[i + 1], scale)};
    pairs[i / 2] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
  }
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(pairs);
}

// A CTA has a row, which it reads twice: the second time mostly from L1.
template <class Element>
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ Quantised p) {
  __shared__ float of_warps[kThreads / 32];
  const int64_t row = blockIdx.x;
  const auto* const x = static_cast<const Element*>(p.x) + row * p.row_stride;
  float largest = 0, numbers[kVector];
  for (int64_t column = threadIdx.x * kVector; column < p.columns; column += kThreads * kVector) {
    read(x + column, numbers);
    largest = larger(largest_of(numbers), largest);
  }
  largest = largest_of_lanes<32>(largest);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (const float each : of_warps) largest = larger(each, largest);
  const float scale = scale_of(largest);
  if (threadIdx.x == 0) p.scales[row] = scale;
  auto* const out = static_cast<uint8_t*>(p.out) + row * p.columns;
  for (int64_t column = threadIdx.x * kVector; column < p.columns; column += kThreads * kVector) {
    read(x + column, numbers);
    write(numbers, scale, out + column);
  }
}

// 16 neighbouring lanes have a block, and a CTA two blocks of eight rows.
template <class Element>
__global__ void __launch_bounds__(kThreads) blocks_kernel(const __grid_constant__ Quantised p) {
  const int part = static_cast<int>(threadIdx.x) / kBlockThreads;
  const int64_t row = int64_t(blockIdx.x) * kRowsOfCta + part % kRowsOfCta;
  const int64_t block = int64_t(blockIdx.y) * (kBlocksOfCta / kRowsOfCta) + part / kRowsOfCta;
  const int64_t column = block * kBlockColumns + threadIdx.x % kBlockThreads * kVector;
  const bool is_there = row < p.rows && column < p.columns;
  float numbers[kVector] = {};
  if (is_there) read(static_cast<const Element*>(p.x) + row * p.row_stride + column, numbers);
  const float scale = scale_of(largest_of_lanes<kBlockThreads>(largest_of(numbers)));
  if (!is_there) return;
  if (threadIdx.x % kBlockThreads == 0) p.scales[block * p.rows + row] = scale;
  write(numbers, scale, static_cast<uint8_t*>(p.out) + row * p.columns + column);
}

template <class Element>
const char* launch(Quantised& problem, cuda::LaunchShape shape) {
  void* parameters[] = {&problem};
  if (!problem.is_in_blocks) {
    shape.grid = dim3(static_cast<unsigned>(problem.rows));
    return cuda::launch<&rows_kernel<Element>>(shape, parameters);
  }
  constexpr int kColumnsOfCta = kBlocksOfCta / kRowsOfCta * kBlockColumns;
  shape.grid = dim3(static_cast<unsigned>((problem.rows + kRowsOfCta - 1) / kRowsOfCta),
                    static_cast<unsigned>((problem.columns + kColumnsOfCta - 1) / kColumnsOfCta));
  return cuda::launch<&blocks_kernel<Element>>(shape, parameters);
}

}  // namespace

const char* quantise_cuda(const Quantised& problem, int device, void* stream) {
  if (problem.rows == 0 || problem.columns == 0) return nullptr;
  const cuda::LaunchShape shape{dim3(1), dim3(kThreads), /*cluster=*/dim3(1), /*shared_bytes=*/0,
                                device,  stream,         /*dependent=*/false};
  Quantised argument = problem;
  switch (problem.element) {
    case ElementType::Float16:
      return launch<__half>(argument, shape);
    case ElementType::BFloat16:
      return launch<__nv_bfloat16>(argument, shape);
    default:
      return launch<float>(argument, shape);
  }
}

}  // namespace epigemm
