// A CTA has a band of columns, which its 32 lanes share, and some of the rows, which its warps share. So a thread has
// the same columns in all its rows, and keeps their values in registers.
#include "elementwise/batch_norm.h"

#include <algorithm>
#include <cstring>

#include "device/launch.h"
#include "device/query.h"
#include "elementwise/typed_vector.cuh"

namespace epigemm {
namespace {

constexpr int kLanes = 32, kWarps = 8, kThreads = kLanes * kWarps;
constexpr int kAtOnce = 4;                // rows whose loads a thread issues before it uses them
constexpr int kBatch = kAtOnce * kWarps;  // rows that a CTA loads at once

template <class Element, int Size>
struct alignas(sizeof(Element) * Size) Pack {
  Element at[Size];
};

template <class Element>
constexpr int kWide = 16 / static_cast<int>(sizeof(Element));  // elements of one access

template <int Size>
constexpr int kBand = kLanes * Size;

template <class Element>
using ComputeOf = typename cuda::ComputeType<Element>::type;

// Where a CTA works.
struct Place {
  int64_t first_column, first_row, end_row;
};

__device__ __forceinline__ Place place_of(const BatchNorm& p, int band, int64_t rows_of_cta) {
  const int64_t bands = (p.columns + band - 1) / band, chunk = blockIdx.x / bands;
  const int64_t first_row = chunk * rows_of_cta;
  return {blockIdx.x % bands * band, first_row, min(first_row + rows_of_cta, p.rows)};
}

// What y is made of, in one column.
template <class Compute>
struct Column {
  Compute mean, variance, scale, gamma, beta, inverse, t, slope;

  __device__ Column(const BatchNorm& p, int64_t column)
      : mean(static_cast<const Compute*>(p.mean)[column]),
        variance(static_cast<const Compute*>(p.variance)[column]),
        scale(cuda::load<Compute>(p.scale, column, 1)),
        gamma(cuda::load<Compute>(p.gamma, column, 1)),
        beta(cuda::load<Compute>(p.beta, column, 0)),
        inverse(1 / sqrt(scale * scale * variance + static_cast<Compute>(p.eps))),
        t(scale * inverse),
        slope(gamma * t) {}
};

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

template <class Element, int Size>
__device__ __forceinline__ void to_compute(const Pack<Element, Size>& in, ComputeOf<Element> (&out)[Size]) {
  if constexpr (Size == 1) {
    out[0] = cuda::to_compute(in.at[0]);
  } else {
#pragma unroll
    for (int i = 0; i < Size; i += 2) cuda::to_compute_pair(in.at + i, out + i);
  }
}

template <class Element, int Size>
__device__ __forceinline__ Pack<Element, Size> from_compute(const ComputeOf<Element> (&in)[Size]) {
  Pack<Element, Size> out;
  if constexpr (Size == 1) {
    out.at[0] = cuda::from_compute<Element>(in[0]);
  } else {
#pragma unroll
    for (int i = 0; i < Size; i += 2) cuda::from_compute_pair<Element>(in + i, out.at + i);
  }
  return out;
}

// Calls body(row, count) for a thread's rows: kAtOnce of them, each kWarps behind the last, or one.
template <class Body>
__device__ __forceinline__ void for_rows(const Place& place, Body body) {
  int64_t row = place.first_row + static_cast<int>(threadIdx.x) / kLanes;
  for (; row + (kAtOnce - 1) * kWarps < place.end_row; row += kAtOnce * kWarps) {
    body(row, std::integral_constant<int, kAtOnce>{});
  }
  for (; row < place.end_row; row += kWarps) body(row, std::integral_constant<int, 1>{});
}

template <class Element, int Size, int Count>
__device__ __forceinline__ void load_rows(const void* matrix, int64_t offset, int64_t columns,
                                          Pack<Element, Size> (&out)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    const auto* const from = static_cast<const Element*>(matrix) + offset + i * kWarps * columns;
    out[i] = *reinterpret_cast<const Pack<Element, Size>*>(from);
  }
}

// 16 bytes by one access. Of an assignment nvcc 13.0 makes an access for each 4 or 8 bytes, and a warp's accesses then
// leave gaps between their lanes.
template <class Element, int Size>
__device__ __forceinline__ void store_row(void* matrix, int64_t offset, const Pack<Element, Size>& values) {
  auto* const to = static_cast<Element*>(matrix) + offset;
  if constexpr (sizeof(values) == 16) {
    uint32_t words[4];
    memcpy(words, &values, sizeof words);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  } else {
    *reinterpret_cast<Pack<Element, Size>*>(to) = values;
  }
}

// The rows that a thread writes, kAtOnce at a time, each kWarps behind the last.
struct Batches {
  int64_t offset, step;  // of the first one, and to the next one, in elements
  int left;              // rows of the CTA from the first one on; none outside the matrix

  __device__ Batches(const Place& place, int64_t columns, int size) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
    const int64_t column = place.first_column + lane * size;
    offset = (place.first_row + warp) * columns + column;
    step = kWarps * columns;
    left = column < columns ? static_cast<int>(place.end_row - place.first_row) - warp : 0;
  }

  __device__ bool has(int i) const { return i * kWarps < left; }
  __device__ int64_t offset_of(int i) const { return offset + i * step; }
  __device__ void advance() {
    left -= kBatch;
    offset += kAtOnce * step;
  }

  template <class Element, int Size>
  __device__ __forceinline__ void load(const void* matrix, Pack<Element, Size> (&out)[kAtOnce]) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (has(i)) {
        out[i] = *reinterpret_cast<const Pack<Element, Size>*>(static_cast<const Element*>(matrix) + offset_of(i));
      }
    }
  }
};

// Whether a ReLU has cut y. As torch's derivative: a NaN is not cut. y is rounded first, as the forward pass did.
template <class Element, class Compute>
__device__ __forceinline__ bool is_cut(Compute centred, Compute slope, Compute beta) {
  return cuda::to_compute(cuda::from_compute<Element>(fma(centred, slope, beta))) <= 0;
}

// --- forward ---------------------------------------------------------------------------------------------------------

template <class Compute>
__device__ void update_running(const BatchNormForward& p, int64_t column, const Column<Compute>& of) {
  const auto rows = static_cast<Compute>(p.rows);
  const auto factor = static_cast<Compute>(p.tracked ? 1.0 / static_cast<double>(*p.tracked) : p.momentum);
  const auto follow = [&](const WrittenVector& running, Compute value) {
    if (!running.data) return;
    const auto before = cuda::load<Compute>(FoldVector{running.data, running.stride, running.element}, column, 0);
    cuda::store(running, column, factor * value + (1 - factor) * before);
  };
  follow(p.running_mean, of.scale * of.mean);
  follow(p.running_variance, of.scale * of.scale * of.variance * (rows / (rows - 1)));
}

// Both kernels that write a matrix load their first rows before they compute the columns' values, which takes as long
// as the loads. The bounds keep 64 KB of loads or more in flight on a multiprocessor: 16 bytes of 4 rows of each thread
// here, of 8 below.
template <class Element, int Size>
__global__ void __launch_bounds__(kThreads, 4)
    forward_kernel(const __grid_constant__ BatchNormForward p, int64_t rows_of_cta) {
  using Compute = ComputeOf<Element>;
  __shared__ alignas(16) Compute shared[3][kBand<Size>];
  const Place place = place_of(p, kBand<Size>, rows_of_cta);
  Batches rows(place, p.columns, Size);
  Pack<Element, Size> u[kAtOnce];
  rows.load(p.u, u);
  if (const int64_t column = place.first_column + threadIdx.x; threadIdx.x < kBand<Size> && column < p.columns) {
    const Column<Compute> of(p, column);
    shared[0][threadIdx.x] = of.mean;
    shared[1][threadIdx.x] = of.slope;
    shared[2][threadIdx.x] = of.beta;
    if (place.first_row == 0) update_running(p, column, of);
  }
  __syncthreads();
  Compute mean[Size], slope[Size], beta[Size];
  read_shared(shared[0], mean);
  read_shared(shared[1], slope);
  read_shared(shared[2], beta);
  while (rows.has(0)) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (!rows.has(i)) break;
      Compute values[Size];
      to_compute(u[i], values);
#pragma unroll
      for (int j = 0; j < Size; ++j) {
        const Compute y = fma(values[j] - mean[j], slope[j], beta[j]);
        values[j] = p.relu && y <= 0 ? Compute(0) : y;
      }
      store_row(p.y, rows.offset_of(i), from_compute<Element>(values));
    }
    rows.advance();
    rows.load(p.u, u);
  }
}

// --- backward --------------------------------------------------------------------------------------------------------

// S1 and S2 of a chunk of rows, into two rows of the workspace. At least 2 CTAs of an SM: without that bound sm_80's
// kernels spill 8 bytes for a third one.
template <class Element, int Size, bool Relu>
__global__ void __launch_bounds__(kThreads, 2)
    sums_kernel(const __grid_constant__ BatchNormBackward p, int64_t rows_of_cta) {
  using Compute = ComputeOf<Element>;
  __shared__ alignas(16) Compute shared[3][kBand<Size>];
  __shared__ alignas(16) Compute sums[kWarps][2][kBand<Size>];
  const Place place = place_of(p, kBand<Size>, rows_of_cta);
  const int64_t own = place.first_column + threadIdx.x;
  const bool has_own = threadIdx.x < kBand<Size> && own < p.columns;
  if (has_own) {
    const Column<Compute> of(p, own);
    shared[0][threadIdx.x] = of.mean;
    shared[1][threadIdx.x] = of.slope;
    shared[2][threadIdx.x] = of.beta;
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t column = place.first_column + lane * Size;
  if (column < p.columns) {
    Compute mean[Size], slope[Size], beta[Size], first[Size] = {}, second[Size] = {};
    read_shared(shared[0], mean);
    if constexpr (Relu) {
      read_shared(shared[1], slope);
      read_shared(shared[2], beta);
    }
    for_rows(place, [&](int64_t row, auto count) {
      const int64_t offset = row * p.columns + column;
      Pack<Element, Size> u[count.value], grad[count.value];
      load_rows(p.u, offset, p.columns, u);
      load_rows(p.grad, offset, p.columns, grad);
#pragma unroll
      for (int i = 0; i < count.value; ++i) {
        Compute values[Size], grads[Size];
        to_compute(u[i], values);
        to_compute(grad[i], grads);
#pragma unroll
        for (int j = 0; j < Size; ++j) {
          const Compute centred = values[j] - mean[j];
          if constexpr (Relu) {
            if (is_cut<Element>(centred, slope[j], beta[j])) grads[j] = 0;
          }
          first[j] += grads[j];
          second[j] = fma(grads[j], centred, second[j]);
        }
      }
    });
#pragma unroll
    for (int j = 0; j < Size; ++j) {
      sums[warp][0][lane * Size + j] = first[j];
      sums[warp][1][lane * Size + j] = second[j];
    }
  }
  __syncthreads();
  if (!has_own) return;
  auto* const to = static_cast<Compute*>(p.workspace) + 2 * (place.first_row / rows_of_cta) * p.columns + own;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    Compute total = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total += sums[i][which][threadIdx.x];
    to[which * p.columns] = total;
  }
}

// The rows of factors behind the sums.
template <class Compute>
__device__ __forceinline__ Compute* factors_of(const BatchNormBackward& p) {
  return static_cast<Compute*>(p.workspace) + 2 * p.chunks * p.columns;
}

// Adds the sums of all chunks, and computes the vectors' gradients and the factors of grad_u.
template <class Compute>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ BatchNormBackward p) {
  const int64_t column = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= p.columns) return;
  const auto* const sums = static_cast<const Compute*>(p.workspace) + column;
  Compute first = 0, second = 0;
#pragma unroll 8
  for (int64_t i = 0; i < p.chunks; ++i) {
    first += sums[2 * i * p.columns];
    second += sums[(2 * i + 1) * p.columns];
  }
  const Column<Compute> of(p, column);
  const auto rows = static_cast<Compute>(p.rows), eps = static_cast<Compute>(p.eps);
  cuda::store(p.grad_beta, column, first);
  cuda::store(p.grad_gamma, column, of.t * second);
  cuda::store(p.grad_scale, column, of.gamma * of.inverse * (eps * of.inverse * of.inverse) * second);
  cuda::store(p.grad_bias, column, first - first);
  auto* const factors = factors_of<Compute>(p) + column;
  factors[0] = of.slope;
  factors[p.columns] = first / rows;
  factors[2 * p.columns] = of.t * of.t * second / rows;
}

template <class Element, int Size, bool Relu>
__global__ void __launch_bounds__(kThreads, sizeof(Element) == 4 ? 3 : 2)
    gradient_kernel(const __grid_constant__ BatchNormBackward p, int64_t rows_of_cta) {
  using Compute = ComputeOf<Element>;
  __shared__ alignas(16) Compute shared[5][kBand<Size>];
  const Place place = place_of(p, kBand<Size>, rows_of_cta);
  Batches rows(place, p.columns, Size);
  Pack<Element, Size> u[kAtOnce], grad[kAtOnce];
  rows.load(p.u, u);
  rows.load(p.grad, grad);
  if (const int64_t column = place.first_column + threadIdx.x; threadIdx.x < kBand<Size> && column < p.columns) {
    const Compute* const factors = factors_of<Compute>(p) + column;
    for (int i = 0; i < 3; ++i) shared[i][threadIdx.x] = factors[i * p.columns];
    shared[3][threadIdx.x] = static_cast<const Compute*>(p.mean)[column];
    shared[4][threadIdx.x] = Relu ? cuda::load<Compute>(p.beta, column, 0) : Compute(0);
  }
  __syncthreads();
  Compute slope[Size], shift[Size], tilt[Size], mean[Size], beta[Size];
  read_shared(shared[0], slope);
  read_shared(shared[1], shift);
  read_shared(shared[2], tilt);
  read_shared(shared[3], mean);
  if constexpr (Relu) read_shared(shared[4], beta);
  while (rows.has(0)) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (!rows.has(i)) break;
      Compute values[Size], grads[Size];
      to_compute(u[i], values);
      to_compute(grad[i], grads);
#pragma unroll
      for (int j = 0; j < Size; ++j) {
        const Compute centred = values[j] - mean[j];
        if constexpr (Relu) {
          if (is_cut<Element>(centred, slope[j], beta[j])) grads[j] = 0;
        }
        values[j] = slope[j] * fma(-centred, tilt[j], grads[j] - shift[j]);
      }
      store_row(p.grad_u, rows.offset_of(i), from_compute<Element>(values));
    }
    rows.advance();
    rows.load(p.u, u);
    rows.load(p.grad, grad);
  }
}

// --- launches --------------------------------------------------------------------------------------------------------

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

int64_t divided_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Rows of a CTA of a pass that writes a matrix: enough of them to pay for a band's values, few enough that the CTAs are
// many rounds of all multiprocessors, of which the last is then a small part.
int64_t rows_of_a_pass(const BatchNorm& p, int64_t bands) {
  constexpr int64_t kWantedOfEach = 16;
  const int64_t wanted = kWantedOfEach * cuda::device(p.device).multiprocessors;
  return kBatch * std::clamp<int64_t>(divided_up(p.rows * bands, wanted * kBatch), 1, 2);
}

template <auto Kernel, class Problem>
const char* launch(const Problem& problem, int64_t ctas, int64_t rows_of_cta) {
  const cuda::LaunchShape shape{dim3(static_cast<unsigned>(ctas)),
                                dim3(kThreads),
                                /*cluster=*/dim3(1),
                                /*shared_bytes=*/0,
                                problem.device,
                                problem.stream,
                                /*dependent=*/false};
  Problem argument = problem;
  void* parameters[] = {&argument, &rows_of_cta};
  return cuda::launch<Kernel>(shape, parameters);
}

template <class Element, int Size>
const char* launch_forward(const BatchNormForward& p) {
  const int64_t bands = divided_up(p.columns, kBand<Size>), rows = rows_of_a_pass(p, bands);
  return launch<&forward_kernel<Element, Size>>(p, bands * divided_up(p.rows, rows), rows);
}

template <class Compute>
const char* launch_merge(const BatchNormBackward& p) {
  constexpr int kColumns = 64;  // of a CTA: few, so that many SMs have one
  const cuda::LaunchShape shape{dim3(static_cast<unsigned>(divided_up(p.columns, kColumns))),
                                dim3(kColumns),
                                /*cluster=*/dim3(1),
                                /*shared_bytes=*/0,
                                p.device,
                                p.stream,
                                /*dependent=*/false};
  BatchNormBackward argument = p;
  void* parameters[] = {&argument};
  return cuda::launch<&merge_kernel<Compute>>(shape, parameters);
}

template <class Element, int Size, bool Relu>
const char* launch_backward(const BatchNormBackward& p) {
  const int64_t bands = divided_up(p.columns, kBand<Size>), of_chunk = divided_up(p.rows, p.chunks);
  BatchNormBackward problem = p;
  problem.chunks = divided_up(p.rows, of_chunk);
  const char* refused = launch<&sums_kernel<Element, Size, Relu>>(problem, bands * problem.chunks, of_chunk);
  if (!refused) refused = launch_merge<ComputeOf<Element>>(problem);
  if (refused || !p.grad_u) return refused;
  const int64_t rows = rows_of_a_pass(p, bands);
  return launch<&gradient_kernel<Element, Size, Relu>>(problem, bands * divided_up(p.rows, rows), rows);
}

// Calls body with a value of the element type, and with how many elements an access may have.
template <class Body>
const char* with_access(const BatchNorm& p, bool is_aligned, Body body) {
  return cuda::with_element_type(p.element, [&](auto element) {
    using Element = decltype(element);
    const bool is_wide = is_aligned && aligned(p.u) && p.columns % kWide<Element> == 0;
    return is_wide ? body(element, std::integral_constant<int, kWide<Element>>{})
                   : body(element, std::integral_constant<int, 1>{});
  });
}

}  // namespace

const char* batch_norm_forward_cuda(const BatchNormForward& problem) {
  return with_access(problem, aligned(problem.y),
                     [&](auto element, auto size) { return launch_forward<decltype(element), size.value>(problem); });
}

const char* batch_norm_backward_cuda(const BatchNormBackward& problem) {
  const bool is_aligned = aligned(problem.grad) && aligned(problem.grad_u);
  return with_access(problem, is_aligned, [&](auto element, auto size) {
    using Element = decltype(element);
    return problem.relu ? launch_backward<Element, size.value, true>(problem)
                        : launch_backward<Element, size.value, false>(problem);
  });
}

}  // namespace epigemm
