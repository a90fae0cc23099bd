// Why remembered roots are copied: the GEMM reads them several times, and writes the right ones to where they are
// remembered, as other calls on other streams do. From the copy all its tiles get the same ones.
#include "gemm/fp16_slices/weight_roots.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "device/dependent.cuh"
#include "device/launch.h"
#include "gemm/fp16_slices/weight_scale.h"

namespace epigemm::fp16_slices {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMostBlocks = 1024;    // they go on to other rows, so that a copy has few
constexpr int kHeld = 4;             // vectors that a lane has on their way
constexpr int kHeldTransposed = 16;  // the same of numbers

// A weight's place: the roots that are remembered, and behind them for how many calls the weight is looked at
// (weight_scale.h).
struct Place {
  float* roots;  // or null
  bool is_new;
  int64_t rows;

  __device__ int* looks() const { return reinterpret_cast<int*>(roots + rows); }
  __device__ bool is_looked_at() const { return *looks() > 0 && *looks() <= kLooks; }

  // Remembers a root that was found in the weight.
  __device__ void keep(int64_t row, float root) const {
    if (!roots) return;
    if (!is_new && roots[row] != root) atomicMax(looks(), kLooks);
    roots[row] = root;
  }
};

__device__ __forceinline__ float root_of(float largest) { return row_root(weight_exponent(largest)); }

// By a CTA: the root of the i-th row.
__device__ void find_root(const StridedMatrix& weight, int64_t i, const Place& place, float* roots) {
  __shared__ float of_warp[kWarps];
  const float* const row = weight.data + i * weight.row_stride;
  const auto* const vectors = reinterpret_cast<const float4*>(row);  // rows are whole 16 bytes (coverage.h)
  const int count = static_cast<int>(weight.columns / 4);
  float largest = 0.0f;
  const auto take = [&](float x) { largest = larger(largest, finite_magnitude(x)); };
  for (int first = threadIdx.x; first < count; first += kHeld * kThreads) {
    float4 held[kHeld];
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int at = first + j * kThreads;
      held[j] = at < count ? vectors[at] : float4{0, 0, 0, 0};
    }
#pragma unroll
    for (int j = 0; j < kHeld; ++j) take(held[j].x), take(held[j].y), take(held[j].z), take(held[j].w);
  }
  const int64_t rest = 4 * int64_t(count) + threadIdx.x;
  if (rest < weight.columns) take(row[rest]);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  __syncthreads();  // the row before has been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < kWarps; ++warp) largest = larger(largest, of_warp[warp]);
  roots[i] = root_of(largest);
  place.keep(i, root_of(largest));
}

// The same of a transposed weight, whose rows are neighbours in memory: the i-th 32 rows, one a lane.
__device__ void find_roots(const StridedMatrix& weight, int64_t i, const Place& place, float* roots) {
  __shared__ float of_warp[kWarps][32];
  const int64_t row = i * 32 + threadIdx.x % 32;
  const bool is_inside = row < weight.rows;
  float largest = 0.0f;
  for (int64_t first = threadIdx.x / 32; first < weight.columns; first += kHeldTransposed * kWarps) {
    float held[kHeldTransposed];
#pragma unroll
    for (int j = 0; j < kHeldTransposed; ++j) {
      const int64_t k = first + j * kWarps;
      held[j] = is_inside && k < weight.columns ? weight.data[k * weight.column_stride + row] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kHeldTransposed; ++j) largest = larger(largest, finite_magnitude(held[j]));
  }
  __syncthreads();
  of_warp[threadIdx.x / 32][threadIdx.x % 32] = largest;
  __syncthreads();
  if (threadIdx.x >= 32 || !is_inside) return;
  for (int warp = 1; warp < kWarps; ++warp) largest = larger(largest, of_warp[warp][threadIdx.x]);
  roots[row] = root_of(largest);
  place.keep(row, root_of(largest));
}

// Copies what is remembered, whatever it is, or looks at the weight. CTAs may disagree about that, while another call
// changes what is remembered.
template <bool IsTransposed>
__global__ void __launch_bounds__(kThreads) roots_kernel(StridedMatrix weight, Place place, float* roots) {
  cuda::let_dependents_start();
  if (place.roots && !place.is_new) {
    const int64_t step = int64_t(gridDim.x) * kThreads;
    const bool is_looked_at = place.is_looked_at();
    for (int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x; row < place.rows; row += step) {
      const float root = some_root(place.roots[row]);
      if (!is_looked_at) roots[row] = root;
    }
    if (!is_looked_at) return;
  }
  const int64_t parts = IsTransposed ? (weight.rows + 31) / 32 : weight.rows;
  for (int64_t i = blockIdx.x; i < parts; i += gridDim.x) {
    IsTransposed ? find_roots(weight, i, place, roots) : find_root(weight, i, place, roots);
  }
  if (blockIdx.x > 0 || threadIdx.x > 0 || !place.roots) return;
  if (place.is_new) {
    *place.looks() = 0;
  } else {
    atomicSub(place.looks(), 1);
  }
}

template <auto Kernel>
const char* enqueue(int64_t blocks, int device, void* stream, void** parameters) {
  const cuda::LaunchShape shape{/*grid=*/dim3(static_cast<unsigned>(blocks)),
                                /*block=*/dim3(kThreads),
                                /*cluster=*/dim3(1),
                                /*shared_bytes=*/0,
                                device,
                                stream,
                                /*dependent=*/false};
  return cuda::launch<Kernel>(shape, parameters);
}

constexpr int64_t kPlaces = int64_t(1) << 22;  // 16 MiB
constexpr int64_t kAligned = 64;               // so that two weights share no sector

__device__ float all_places[kPlaces];  // each device has its own

using Weight = std::tuple<const void*, int64_t, int64_t, int64_t, int64_t>;

// What is remembered on one device.
struct Memory {
  float* roots = nullptr;
  int64_t used = 0;
  std::map<Weight, int64_t> places;
};

// Never destroyed: calls may come while the process ends.
struct Memories {
  std::mutex mutex;
  std::map<int, Memory> of_device;
};
Memories& memories() {
  static auto* const all = new Memories;
  return *all;
}

float* find_places(int device) {
  void* found = nullptr;
  int current = 0;
  if (cudaGetDevice(&current) == cudaSuccess && cudaSetDevice(device) == cudaSuccess) {
    if (cudaGetSymbolAddress(&found, all_places) != cudaSuccess) found = nullptr;
    cudaSetDevice(current);
  }
  cudaGetLastError();  // where there is no memory, nothing is remembered
  return static_cast<float*>(found);
}

bool is_capturing(void* stream) {
  auto status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) == cudaSuccess) {
    return status != cudaStreamCaptureStatusNone;
  }
  cudaGetLastError();  // the default stream beside a capture
  return true;
}

}  // namespace

Remembered remembered_roots(const StridedMatrix& weight, int device, void* stream) {
  const int64_t needed = (weight.rows + 1 + kAligned - 1) / kAligned * kAligned;
  if (needed > kPlaces) return {};
  const Weight key{weight.data, weight.rows, weight.columns, weight.row_stride, weight.column_stride};
  const std::lock_guard<std::mutex> lock(memories().mutex);
  Memory& memory = memories().of_device[device];
  if (const auto found = memory.places.find(key); found != memory.places.end()) {
    return {memory.roots + found->second, /*is_new=*/false};
  }
  if (is_capturing(stream)) return {};
  if (!memory.roots) memory.roots = find_places(device);
  if (!memory.roots) return {};
  if (memory.used + needed > kPlaces) {
    memory.places.clear();
    memory.used = 0;
  }
  memory.places[key] = memory.used;
  memory.used += needed;
  return {memory.roots + memory.used - needed, /*is_new=*/true};
}

const char* weight_roots_cuda(const StridedMatrix& weight, const Remembered& remembered, float* roots, int device,
                              void* stream) {
  StridedMatrix matrix = weight;
  Place place{remembered.roots, remembered.is_new, weight.rows};
  void* parameters[] = {&matrix, &place, &roots};
  const bool is_transposed = weight.column_stride != 1;
  const int64_t parts = is_transposed ? (weight.rows + 31) / 32 : weight.rows;
  const int64_t blocks = std::min<int64_t>(parts, kMostBlocks);
  return is_transposed ? enqueue<&roots_kernel<true>>(blocks, device, stream, parameters)
                       : enqueue<&roots_kernel<false>>(blocks, device, stream, parameters);
}

}  // namespace epigemm::fp16_slices
