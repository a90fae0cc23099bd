// grad_x = grad * d epilogue(x) / dx on CUDA, for contiguous tensors: the functors, applied to dual numbers whose
// derivative is grad, so that relu selects it and a division divides it as torch's own derivatives do.
#pragma once

#include "epilogue/dual.h"  // before the functors

#include "elementwise/bands.cuh"
#include "elementwise/kernel.cuh"

namespace epigemm::cuda {

template <class Functor, class Element, class... Values>
__device__ __forceinline__ typename ComputeType<Element>::type derivative(typename ComputeType<Element>::type grad,
                                                                          typename ComputeType<Element>::type x,
                                                                          Values... values) {
  using Compute = typename ComputeType<Element>::type;
  using Number = Argument<Element>;
  const Dual<Number> variable(Number{x}, Number{grad});
  return static_cast<Compute>(Functor::apply(variable, Dual<Number>(static_cast<Number>(values))...).derivative);
}

template <class Functor, class Element, class Compute, int... Index>
__device__ __forceinline__ Element derivative_of_one(Element grad, Element x, const Operands<Compute>& operands,
                                                     uint32_t column, std::integer_sequence<int, Index...>) {
  return from_compute<Element>(derivative<Functor, Element>(
      to_compute(grad), to_compute(x), load_or_absent<Functor, Element, Index + 1>(operands, column)...));
}

template <class Functor, class Element, Columns Mode, int... Index>
__device__ __forceinline__ Vector<Element> derivative_of_vector(
    const Vector<Element>& grad, const Vector<Element>& x,
    const VectorEpilogue<Functor, Element, Mode, std::integer_sequence<int, Index...>>& operands) {
  using Compute = typename ComputeType<Element>::type;
  Compute gradients[Vector<Element>::kSize], values[Vector<Element>::kSize];
  Vector<Element> out;
#pragma unroll
  for (int i = 0; i < Vector<Element>::kSize; i += 2) {
    to_compute_pair(grad.values + i, gradients + i);
    to_compute_pair(x.values + i, values + i);
  }
#pragma unroll
  for (int i = 0; i < Vector<Element>::kSize; ++i) {
    gradients[i] = derivative<Functor, Element>(
        gradients[i], values[i],
        static_cast<const OperandVector<Functor, Element, Index + 1, Mode>&>(operands).values[i]...);
  }
#pragma unroll
  for (int i = 0; i < Vector<Element>::kSize; i += 2) from_compute_pair<Element>(gradients + i, out.values + i);
  return out;
}

// As contiguous_kernel, with a second tensor that is read: one vector of each a thread.
template <class Functor, class Element, Columns Mode>
__global__ void __launch_bounds__(kThreads)
    derivative_kernel(const Element* grad, const Element* x, Element* out, int64_t elements, Divider columns,
                      Operands<typename ComputeType<Element>::type> operands) {
  constexpr int kSize = Vector<Element>::kSize;
  const int64_t index = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kSize;
  if (index >= elements) return;
  uint32_t column = 0;
  if constexpr (Mode != Columns::None) columns.divide(index, column);
  if constexpr (Mode != Columns::Aligned) {
    if (index + kSize > elements) {
#pragma unroll 1
      for (int64_t i = index; i < elements; ++i) {
        out[i] = derivative_of_one<Functor>(grad[i], x[i], operands, column, OperandIndices<Functor>{});
        if (++column == columns.count) column = 0;
      }
      return;
    }
  }
  const auto grads = *reinterpret_cast<const Vector<Element>*>(grad + index);
  const auto values = *reinterpret_cast<const Vector<Element>*>(x + index);
  const VectorEpilogue<Functor, Element, Mode> loaded(operands, column, columns.count);
  *reinterpret_cast<Vector<Element>*>(out + index) = derivative_of_vector(grads, values, loaded);
}

// Any alignment: a view may begin anywhere.
template <class Functor, class Element>
__global__ void __launch_bounds__(kThreads)
    unaligned_derivative_kernel(const Element* grad, const Element* x, Element* out, int64_t elements, Divider columns,
                                Operands<typename ComputeType<Element>::type> operands) {
  const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= elements) return;
  uint32_t column = 0;
  columns.divide(index, column);
  out[index] = derivative_of_one<Functor>(grad[index], x[index], operands, column, OperandIndices<Functor>{});
}

// One that also sums the columns of what it writes, over the rows of each CTA. Two rows of grad and x of each thread of
// three CTAs are 48 KB of loads in flight on a multiprocessor. In fp64 the registers of three would not do.
constexpr int kSumWarps = 8, kSumRows = 2;

template <class Functor, class Element>
__global__ void __launch_bounds__(bands::kLanes* kSumWarps, sizeof(Element) == 8 ? 1 : 3)
    derivative_sums_kernel(const Element* grad, const Element* x, Element* out, int64_t rows, int64_t columns,
                           int64_t rows_of_cta, typename ComputeType<Element>::type* partial_sums,
                           Operands<typename ComputeType<Element>::type> operands) {
  using Compute = typename ComputeType<Element>::type;
  constexpr int kSize = Vector<Element>::kSize, kBand = bands::kBand<kSize>;
  __shared__ Compute shared[kSumWarps][kBand];
  const bands::Place place = bands::place_of(rows, columns, kBand, rows_of_cta);
  const int own = static_cast<int>(threadIdx.x), lane = own % bands::kLanes, warp = own / bands::kLanes;
  bands::Batches<kSumWarps, kSumRows> batch(place, columns, kSize);
  Compute sums[kSize] = {};
  if (batch.has(0)) {
    const auto column = static_cast<uint32_t>(place.first_column + lane * kSize);
    const VectorEpilogue<Functor, Element, Columns::Aligned> loaded(operands, column, 0);
#pragma unroll 1
    for (; batch.has(0); batch.advance()) {
      Vector<Element> grads[kSumRows], values[kSumRows];
      batch.load(grad, grads);
      batch.load(x, values);
#pragma unroll
      for (int i = 0; i < kSumRows; ++i) {
        if (!batch.has(i)) break;
        const Vector<Element> found = derivative_of_vector(grads[i], values[i], loaded);
        bands::store_row(out, batch.offset_of(i), found);
#pragma unroll
        for (int j = 0; j < kSize; ++j) sums[j] += to_compute(found.values[j]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) shared[warp][lane * kSize + j] = sums[j];
  __syncthreads();
  if (own >= kBand || place.first_column + own >= columns) return;
  Compute total = 0;
#pragma unroll
  for (int i = 0; i < kSumWarps; ++i) total += shared[i][own];
  partial_sums[place.first_row / rows_of_cta * columns + place.first_column + own] = total;
}

template <class Functor, class Element, class Compute>
void launch_derivative_with_sums(const DerivativeProblem& problem, const Operands<Compute>& operands) {
  const int64_t rows = problem.rows(), columns = problem.columns();
  const int64_t of_cta = bands::divided_up(rows, problem.chunks);
  const int64_t ctas = bands::divided_up(columns, bands::kBand<Vector<Element>::kSize>) * problem.chunks;
  derivative_sums_kernel<Functor, Element>
      <<<static_cast<unsigned>(ctas), bands::kLanes * kSumWarps, 0, static_cast<cudaStream_t>(problem.stream)>>>(
          static_cast<const Element*>(problem.grad), static_cast<const Element*>(problem.x),
          static_cast<Element*>(problem.out), rows, columns, of_cta, static_cast<Compute*>(problem.partial_sums),
          operands);
}

template <class Functor, class Element>
void launch_derivative_of(const DerivativeProblem& problem) {
  using Compute = typename ComputeType<Element>::type;
  constexpr int kSize = Vector<Element>::kSize;
  Operands<Compute> operands{};
  const bool wide = aligned(problem.grad) && aligned(problem.x) && aligned(problem.out);
  const int64_t columns = problem.columns(), elements = problem.elements();
  bool whole_vectors = columns % kSize == 0;
  for (std::size_t i = 1; i < Functor::operands.size(); ++i) {
    operands.data[i - 1] = problem.operands[i - 1].data;
    operands.values[i - 1] = static_cast<Compute>(problem.operands[i - 1].value);
    whole_vectors = whole_vectors && aligned(problem.operands[i - 1].data);
  }
  if (problem.partial_sums) return launch_derivative_with_sums<Functor, Element>(problem, operands);
  const auto launch = [&](auto kernel, int64_t threads, int64_t period) {
    kernel<<<blocks_for(threads), kThreads, 0, static_cast<cudaStream_t>(problem.stream)>>>(
        static_cast<const Element*>(problem.grad), static_cast<const Element*>(problem.x),
        static_cast<Element*>(problem.out), elements, Divider(period), operands);
  };
  const int64_t vectors = (elements + kSize - 1) / kSize;
  const bool vectors_given = reads<Functor>(OperandKind::PerColumn) && has_vectors(problem);
  if (!wide) {
    launch(&unaligned_derivative_kernel<Functor, Element>, elements, vectors_given ? columns : 1);
  } else if (!vectors_given) {
    launch(&derivative_kernel<Functor, Element, Columns::None>, vectors, 1);
  } else if (whole_vectors) {
    launch(&derivative_kernel<Functor, Element, Columns::Aligned>, vectors, columns);
  } else {
    launch(&derivative_kernel<Functor, Element, Columns::Unaligned>, vectors, columns);
  }
}

template <class Functor>
void run_derivative(const DerivativeProblem& problem) {
  with_element_type(problem.element, [&](auto element) { launch_derivative_of<Functor, decltype(element)>(problem); });
}

}  // namespace epigemm::cuda
