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

// The weights' place: the roots that are remembered, and behind them for how many calls the weights are looked at
// (weight_scale.h).
struct Place {
  float* roots;  // or null
  bool is_new;
  int64_t rows;  // of all weights

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

// By a CTA: the root of the i-th row of all weights.
__device__ void find_root(const Weights& weights, int64_t i, const Place& place, float* roots) {
  __shared__ float of_warp[kWarps];
  const StridedMatrix& weight = weights.first;
  const int64_t number = i / weight.rows;
  const float* const row = weight.data + number * weights.apart + (i - number * weight.rows) * weight.row_stride;
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

// The same of transposed weights, whose rows are neighbours in memory: the i-th 32 rows, one a lane, of which a weight
// has `each`.
__device__ void find_roots(const Weights& weights, int64_t i, int64_t each, const Place& place, float* roots) {
  __shared__ float of_warp[kWarps][32];
  const StridedMatrix& weight = weights.first;
  const int64_t number = i / each, row = (i - number * each) * 32 + threadIdx.x % 32;
  const float* const data = weight.data + number * weights.apart + row;
  const bool is_inside = row < weight.rows;
  float largest = 0.0f;
  for (int64_t first = threadIdx.x / 32; first < weight.columns; first += kHeldTransposed * kWarps) {
    float held[kHeldTransposed];
#pragma unroll
    for (int j = 0; j < kHeldTransposed; ++j) {
      const int64_t k = first + j * kWarps;
      held[j] = is_inside && k < weight.columns ? data[k * weight.column_stride] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kHeldTransposed; ++j) largest = larger(largest, finite_magnitude(held[j]));
  }
  __syncthreads();
  of_warp[threadIdx.x / 32][threadIdx.x % 32] = largest;
  __syncthreads();
  if (threadIdx.x >= 32 || !is_inside) return;
  for (int warp = 1; warp < kWarps; ++warp) largest = larger(largest, of_warp[warp][threadIdx.x]);
  roots[number * weight.rows + row] = root_of(largest);
  place.keep(number * weight.rows + row, root_of(largest));
}

// Copies what is remembered, whatever it is, and may look at the weights. CTAs may disagree about that: the first one
// counts the look while others still begin, and other calls change what is remembered. So every CTA copies its rows,
// and every row has some root. `statistics`: of `groups` groups of rows, to be set; or null.
template <bool IsTransposed>
__global__ void __launch_bounds__(kThreads)
    roots_kernel(Weights weights, Place place, float* roots, int32_t* statistics, int64_t groups) {
  cuda::let_dependents_start();
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x, step = int64_t(gridDim.x) * kThreads;
  for (int64_t group = first; statistics && group < groups; group += step) statistics[group] = kLargeMask;
  if (place.roots && !place.is_new) {
    for (int64_t row = first; row < place.rows; row += step) roots[row] = some_root(place.roots[row]);
    if (!__syncthreads_or(place.is_looked_at())) return;  // its threads agree
  }
  const int64_t each = IsTransposed ? (weights.first.rows + 31) / 32 : weights.first.rows;
  for (int64_t i = blockIdx.x; i < weights.count * each; i += gridDim.x) {
    IsTransposed ? find_roots(weights, i, each, place, roots) : find_root(weights, i, place, roots);
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

using Key = std::tuple<const void*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

// What is remembered on one device.
struct Memory {
  float* roots = nullptr;
  int64_t used = 0;
  int without = 0;  // calls whose weight got no place
  std::map<Key, int64_t> places;
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

Remembered remembered_roots(const Weights& weights, int device, void* stream) {
  const int64_t needed = (weights.rows() + 1 + kAligned - 1) / kAligned * kAligned;
  if (needed > kPlaces) return {};
  const StridedMatrix& first = weights.first;
  const Key key{first.data,          first.rows,    first.columns, first.row_stride,
                first.column_stride, weights.count, weights.apart};
  const std::lock_guard<std::mutex> lock(memories().mutex);
  Memory& memory = memories().of_device[device];
  if (const auto found = memory.places.find(key); found != memory.places.end()) {
    return {memory.roots + found->second, /*is_new=*/false};
  }
  if (is_capturing(stream)) return {};
  if (!memory.roots) memory.roots = find_places(device);
  if (!memory.roots) return {};
  // A model whose weights have more rows than there are places keeps those of some: if all were forgotten in each turn,
  // no call would find its own. After many weights that got none, which may be those of another model, all are.
  constexpr int kMostWithout = 4096;
  if (memory.used + needed > kPlaces) {
    if (++memory.without < kMostWithout) return {};
    memory.places.clear();
    memory.used = 0, memory.without = 0;
  }
  memory.places[key] = memory.used;
  memory.used += needed;
  return {memory.roots + memory.used - needed, /*is_new=*/true};
}

const char* weight_roots_cuda(const Weights& weights, const Remembered& remembered, float* roots, int32_t* statistics,
                              int device, void* stream) {
  Weights all = weights;
  Place place{remembered.roots, remembered.is_new, weights.rows()};
  int64_t groups = weights.count * groups_of(weights.first.rows);
  void* parameters[] = {&all, &place, &roots, &statistics, &groups};
  const bool is_transposed = weights.first.column_stride != 1;
  const int64_t each = is_transposed ? (weights.first.rows + 31) / 32 : weights.first.rows;
  const int64_t blocks = std::min<int64_t>(weights.count * each, kMostBlocks);
  return is_transposed ? enqueue<&roots_kernel<true>>(blocks, device, stream, parameters)
                       : enqueue<&roots_kernel<false>>(blocks, device, stream, parameters);
}

}  // namespace epigemm::fp16_slices
