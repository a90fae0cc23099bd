#include "elementwise/batch_norm.cuh"

namespace epigemm {
namespace cuda::bands {
namespace {

// Whether a ReLU has cut y. As torch's derivative: a NaN is not cut. y is rounded first, as the forward pass did.
template <class Element, class Compute>
__device__ __forceinline__ bool is_cut(Compute centred, Compute slope, Compute beta) {
  return cuda::to_compute(cuda::from_compute<Element>(fma(centred, slope, beta))) <= 0;
}

// S1 and S2 of a chunk of rows, into two rows of the workspace. At least 2 CTAs of an SM: without that bound sm_80's
// kernels spill 8 bytes for a third one.
template <class Element, int Size, bool Relu>
__global__ void __launch_bounds__(kThreads, 2)
    sums_kernel(const __grid_constant__ BatchNormBackward p, int64_t rows_of_cta) {
  using Compute = ComputeOf<Element>;
  __shared__ alignas(16) Compute shared[3][kBand<Size>];
  __shared__ alignas(16) Compute sums[kWarps][2][kBand<Size>];
  const Place place = place_of(p.rows, p.columns, kBand<Size>, rows_of_cta);
  const int64_t own = place.first_column + threadIdx.x;
  const bool has_own = threadIdx.x < kBand<Size> && own < p.columns;
  if (has_own) {
    const NormColumn<Compute> of(p, own);
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
    for_rows<kWarps>(place, [&](int64_t row, auto count) {
      const int64_t offset = row * p.columns + column;
      Pack<Element, Size> u[count.value], grad[count.value];
      load_rows<kWarps>(static_cast<const Element*>(p.u), offset, p.columns, u);
      load_rows<kWarps>(static_cast<const Element*>(p.grad), offset, p.columns, grad);
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
  const NormColumn<Compute> of(p, column);
  const auto rows = static_cast<Compute>(p.rows), eps = static_cast<Compute>(p.eps);
  store(p.grad_beta, column, first);
  store(p.grad_gamma, column, of.t * second);
  store(p.grad_scale, column, of.gamma * of.inverse * (eps * of.inverse * of.inverse) * second);
  store(p.grad_bias, column, first - first);
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
  const Place place = place_of(p.rows, p.columns, kBand<Size>, rows_of_cta);
  Batches<kWarps> rows(place, p.columns, Size);
  Pack<Element, Size> u[kAtOnce], grad[kAtOnce];
  rows.load(static_cast<const Element*>(p.u), u);
  rows.load(static_cast<const Element*>(p.grad), grad);
  if (const int64_t column = place.first_column + threadIdx.x; threadIdx.x < kBand<Size> && column < p.columns) {
    const Compute* const factors = factors_of<Compute>(p) + column;
    for (int i = 0; i < 3; ++i) shared[i][threadIdx.x] = factors[i * p.columns];
    shared[3][threadIdx.x] = static_cast<const Compute*>(p.mean)[column];
    shared[4][threadIdx.x] = Relu ? load<Compute>(p.beta, column, 0) : Compute(0);
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
      store_row(static_cast<Element*>(p.grad_u), rows.offset_of(i), from_compute<Element>(values));
    }
    rows.advance();
    rows.load(static_cast<const Element*>(p.u), u);
    rows.load(static_cast<const Element*>(p.grad), grad);
  }
}

template <class Compute>
const char* launch_merge(const BatchNormBackward& p) {
  constexpr int kColumns = 64;  // of a CTA: few, so that many SMs have one
  const LaunchShape shape{dim3(static_cast<unsigned>(divided_up(p.columns, kColumns))),
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
  const char* refused = launch<&sums_kernel<Element, Size, Relu>, kWarps>(problem, bands * problem.chunks, of_chunk);
  if (!refused) refused = launch_merge<ComputeOf<Element>>(problem);
  if (refused || !p.grad_u) return refused;
  const int64_t rows = rows_of_a_pass(p, bands);
  return launch<&gradient_kernel<Element, Size, Relu>, kWarps>(problem, bands * divided_up(p.rows, rows), rows);
}

}  // namespace
}  // namespace cuda::bands

const char* batch_norm_backward_cuda(const BatchNormBackward& problem) {
  using namespace cuda::bands;
  const bool is_aligned = aligned(problem.grad) && aligned(problem.grad_u);
  return with_access(problem, is_aligned, [&](auto element, auto size) {
    using Element = decltype(element);
    return problem.relu ? launch_backward<Element, size.value, true>(problem)
                        : launch_backward<Element, size.value, false>(problem);
  });
}

}  // namespace epigemm
