// Why remembered roots are copied: the GEMM reads them several times, and writes the right ones to where they are
// remembered, as other calls on other streams do. From the copy all its tiles get the same ones.
#include "gemm/fp16_slices/weight_roots.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "device/launch.h"
#include "gemm/fp16_slices/weight_scale.h"

namespace epigemm::fp16_slices {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kHeld = 4;  // vectors that a lane has on their way
constexpr int kHeldAcross = 16;  // the same of numbers

__global__ void __launch_bounds__(kThreads) copy_roots_kernel(const float* remembered, float* roots, int64_t rows) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row < rows) roots[row] = some_root(remembered[row]);
}

// A CTA a row, as the split of rows. `remembered`: or null.
__global__ void __launch_bounds__(kThreads) find_roots_kernel(StridedMatrix weight, float* roots, float* remembered) {
  __shared__ float of_warp[kWarps];
  const float* const row = weight.data + blockIdx.x * weight.row_stride;
  const auto* const vectors = reinterpret_cast<const float4*>(row);  // rows are whole 16 bytes (coverage.h)
  const int count = static_cast<int>(weight.columns / 4);
  float largest = 0.0f;
  const auto take = [&](float x) { largest = larger(largest, finite_magnitude(x)); };
  for (int first = threadIdx.x; first < count; first += kHeld * kThreads) {
    float4 held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = first + i * kThreads;
      held[i] = at < count ? vectors[at] : float4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) take(held[i].x), take(held[i].y), take(held[i].z), take(held[i].w);
  }
  const int64_t rest = 4 * int64_t(count) + threadIdx.x;
  if (rest < weight.columns) take(row[rest]);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < kWarps; ++warp) largest = larger(largest, of_warp[warp]);
  const float root = row_root(weight_exponent(largest));
  roots[blockIdx.x] = root;
  if (remembered) remembered[blockIdx.x] = root;
}

// The same of a transposed weight, whose rows are neighbours in memory: a CTA has 32, one a lane.
__global__ void __launch_bounds__(kThreads) find_roots_across_kernel(StridedMatrix weight, float* roots,
                                                                     float* remembered) {
  __shared__ float of_warp[kWarps][32];
  const int64_t row = blockIdx.x * int64_t(32) + threadIdx.x % 32;
  const bool is_inside = row < weight.rows;
  float largest = 0.0f;
  for (int64_t first = threadIdx.x / 32; first < weight.columns; first += kHeldAcross * kWarps) {
    float held[kHeldAcross];
#pragma unroll
    for (int i = 0; i < kHeldAcross; ++i) {
      const int64_t k = first + i * kWarps;
      held[i] = is_inside && k < weight.columns ? weight.data[k * weight.column_stride + row] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kHeldAcross; ++i) largest = larger(largest, finite_magnitude(held[i]));
  }
  of_warp[threadIdx.x / 32][threadIdx.x % 32] = largest;
  __syncthreads();
  if (threadIdx.x >= 32 || !is_inside) return;
  for (int warp = 1; warp < kWarps; ++warp) largest = larger(largest, of_warp[warp][threadIdx.x]);
  const float root = row_root(weight_exponent(largest));
  roots[row] = root;
  if (remembered) remembered[row] = root;
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
  const int64_t needed = (weight.rows + kAligned - 1) / kAligned * kAligned;
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
  float* place = remembered.roots;
  if (place && !remembered.is_new) {
    int64_t rows = weight.rows;
    void* parameters[] = {&place, &roots, &rows};
    return enqueue<&copy_roots_kernel>((rows + kThreads - 1) / kThreads, device, stream, parameters);
  }
  StridedMatrix matrix = weight;
  void* parameters[] = {&matrix, &roots, &place};
  if (weight.column_stride != 1) {
    return enqueue<&find_roots_across_kernel>((weight.rows + 31) / 32, device, stream, parameters);
  }
  return enqueue<&find_roots_kernel>(weight.rows, device, stream, parameters);
}

}  // namespace epigemm::fp16_slices
