// How kernels that need a value of every column walk over a matrix without gaps: a CTA has a band of columns, which its
// 32 lanes share, and some of the rows, which its warps share. So a thread has the same columns in all its rows, and
// keeps their values in registers.
#pragma once

#include <cstring>
#include <utility>

#include "device/launch.h"
#include "device/types.cuh"

namespace epigemm::cuda::bands {

constexpr int kLanes = 32;
constexpr int kAtOnce = 4;  // rows whose loads a thread issues before it uses them

constexpr int64_t divided_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <class Element>
constexpr int kWide = 16 / static_cast<int>(sizeof(Element));  // elements of one access

// The columns of a CTA whose lanes have `Size` of them.
template <int Size>
constexpr int kBand = kLanes * Size;

template <class Element>
using ComputeOf = typename ComputeType<Element>::type;

// The elements of one access.
template <class Element, int Size>
struct alignas(sizeof(Element) * Size) Pack {
  Element at[Size];
};

template <class Element, int Size>
__device__ __forceinline__ void to_compute(const Pack<Element, Size>& in, ComputeOf<Element> (&out)[Size]) {
  if constexpr (Size == 1) {
    out[0] = cuda::to_compute(in.at[0]);
  } else {
#pragma unroll
    for (int i = 0; i < Size; i += 2) to_compute_pair(in.at + i, out + i);
  }
}

template <class Element, int Size>
__device__ __forceinline__ Pack<Element, Size> from_compute(const ComputeOf<Element> (&in)[Size]) {
  Pack<Element, Size> out;
  if constexpr (Size == 1) {
    out.at[0] = cuda::from_compute<Element>(in[0]);
  } else {
#pragma unroll
    for (int i = 0; i < Size; i += 2) from_compute_pair<Element>(in + i, out.at + i);
  }
  return out;
}

// Where a CTA works.
struct Place {
  int64_t first_column, first_row, end_row;
};

__device__ __forceinline__ Place place_of(int64_t rows, int64_t columns, int band, int64_t rows_of_cta) {
  const int64_t bands = (columns + band - 1) / band, chunk = blockIdx.x / bands;
  const int64_t first_row = chunk * rows_of_cta;
  return {blockIdx.x % bands * band, first_row, min(first_row + rows_of_cta, rows)};
}

// A thread's columns of a vector in shared memory.
template <int Size, class Compute>
__device__ __forceinline__ void read_shared(const Compute* shared, Compute (&out)[Size]) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  constexpr int kStep = Size * sizeof(Compute) % 16 == 0 ? 16 / sizeof(Compute) : 1;
#pragma unroll
  for (int i = 0; i < Size; i += kStep) {
    const auto read = *reinterpret_cast<const Pack<Compute, kStep>*>(shared + lane * Size + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) out[i + j] = read.at[j];
  }
}

// Calls body(row, count) for a thread's rows: kAtOnce of them, each `Warps` behind the last, or one.
template <int Warps, class Body>
__device__ __forceinline__ void for_rows(const Place& place, Body body) {
  int64_t row = place.first_row + static_cast<int>(threadIdx.x) / kLanes;
  for (; row + (kAtOnce - 1) * Warps < place.end_row; row += kAtOnce * Warps) {
    body(row, std::integral_constant<int, kAtOnce>{});
  }
  for (; row < place.end_row; row += Warps) body(row, std::integral_constant<int, 1>{});
}

// Loads of rows that lie `Warps` apart.
template <int Warps, class Element, class Access, int Count>
__device__ __forceinline__ void load_rows(const Element* matrix, int64_t offset, int64_t columns,
                                          Access (&out)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    out[i] = *reinterpret_cast<const Access*>(matrix + offset + i * Warps * columns);
  }
}

// 16 bytes by one access. Of an assignment nvcc 13.0 makes an access for each 4 or 8 bytes, and a warp's accesses then
// leave gaps between their lanes.
template <class Element, class Access>
__device__ __forceinline__ void store_row(Element* matrix, int64_t offset, const Access& values) {
  auto* const to = matrix + offset;
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(values) == 16) {
    uint32_t words[4];
    memcpy(words, &values, sizeof words);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
    return;
  }
#endif
  *reinterpret_cast<Access*>(to) = values;
}

// The rows that a thread writes, `AtOnce` at a time, each `Warps` behind the last.
template <int Warps, int AtOnce = kAtOnce>
struct Batches {
  int64_t offset, step;  // of the first one, and to the next one, in elements
  int left;              // rows of the CTA from the first one on; none outside the matrix

  __device__ Batches(const Place& place, int64_t columns, int size) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
    const int64_t column = place.first_column + lane * size;
    offset = (place.first_row + warp) * columns + column;
    step = Warps * columns;
    left = column < columns ? static_cast<int>(place.end_row - place.first_row) - warp : 0;
  }

  __device__ bool has(int i) const { return i * Warps < left; }
  __device__ int64_t offset_of(int i) const { return offset + i * step; }
  __device__ void advance() {
    left -= AtOnce * Warps;
    offset += AtOnce * step;
  }

  template <class Element, class Access>
  __device__ __forceinline__ void load(const Element* matrix, Access (&out)[AtOnce]) const {
#pragma unroll
    for (int i = 0; i < AtOnce; ++i) {
      if (has(i)) out[i] = *reinterpret_cast<const Access*>(matrix + offset_of(i));
    }
  }
};

// A kernel of this module over a matrix: its parameters are the problem, and the rows of a CTA.
template <auto Kernel, int Warps, class Problem>
const char* launch(const Problem& problem, int64_t ctas, int64_t rows_of_cta, bool is_dependent = false) {
  if (ctas > 0x7fffffff) return "the matrix has too many parts for one launch";
  const LaunchShape shape{dim3(static_cast<unsigned>(ctas)),
                          dim3(kLanes * Warps),
                          /*cluster=*/dim3(1),
                          /*shared_bytes=*/0,
                          problem.device,
                          problem.stream,
                          is_dependent};
  Problem argument = problem;
  void* parameters[] = {&argument, &rows_of_cta};
  return cuda::launch<Kernel>(shape, parameters);
}

}  // namespace epigemm::cuda::bands
