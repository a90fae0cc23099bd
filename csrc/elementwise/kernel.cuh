// The elementwise kernels: D = epilogue(x) and its derivatives. Each is a template of its functor, which is one of the
// package (functor.cuh) or the one that is linked in (open::Linked).
#pragma once

#include <type_traits>

#include "elementwise/bands.cuh"
#include "elementwise/tiling.h"
#include "open/epilogue.cuh"

namespace epigemm::cuda {

template <class Element>
constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(Element));  // elements of a thread's vector

// The rows of which a thread computes a vector. A vector of columns in fp32 beside bf16 is twice as long: read once per
// row it would come from L2 twice as often as x from memory. Four rows are 1% slower, eight 2%; beside fp32 elements
// two already are, by 1%, for the longer stride between a thread's rows costs more than it saves (H200).
template <class Element>
constexpr int kRowsOfThread = sizeof(Element) == 2 ? 2 : 1;

// An absent vector is read as -0 beside 16-bit elements: x + -0 is x for every x, so the compiler may drop the
// addition. With +0 the sign of a zero would depend on whether it does.
template <class Element>
constexpr bool kIsAbsentNegative = sizeof(Element) == 2;

// The matrix, as every kernel receives it.
struct Frame {
  int64_t m, n;
  int64_t period;  // the columns of the matrix, if its rows are taken as one row; else 0
  uint32_t blocks_across;
  bool is_wide;  // every row of every matrix, and every vector of columns, begins at a multiple of kVectorBytes
};

template <class Element>
struct ElementwiseArguments {
  Frame frame;
  const void* x;
  void* out;
  int64_t x_row_stride, out_row_stride;
  open::Operands<typename ComputeType<Element>::type> operands;
};

template <class Element>
struct DerivativeArguments {
  Frame frame;
  const void *grad, *acc;
  int64_t grad_row_stride, acc_row_stride;
  bool is_acc_of_compute;
  void* out[1 + open::kSlots];  // of the accumulator, then by slot; null = not wanted
  bool is_out_of_compute[1 + open::kSlots];
  open::Operands<typename ComputeType<Element>::type> operands;
  // Of the kernel that also sums the columns: see DerivativeProblem.
  void* partial_sums;
  int64_t rows_of_part;
};

template <class Functor, class Element, int kSize>
using EpilogueOf = open::Epilogue<Element, kSize, open::Access::Wide, Functor>;

// Calls body(size, row, column) for a thread's part: once for a whole vector, else for every element.
template <class Element, int kRows, class Body>
__device__ __forceinline__ void for_thread_part(const Frame& frame, Body body) {
  constexpr int kSize = kWidth<Element>;
  const int width = frame.is_wide ? kSize : 1;
  const Place place =
      place_of(blockIdx.x, frame.blocks_across, threadIdx.x, threadIdx.y, blockDim.x, blockDim.y, width, kRows);
  if (place.row >= frame.m || place.column >= frame.n) return;
  if (frame.is_wide && place.column + kSize <= frame.n) {
    return body(std::integral_constant<int, kSize>{}, place.row, place.column);
  }
  const int64_t end = place.column + width < frame.n ? place.column + width : frame.n;
#pragma unroll 1
  for (int64_t column = place.column; column < end; ++column) body(std::integral_constant<int, 1>{}, place.row, column);
}

template <class Element, int kSize>
__device__ __forceinline__ void store(void* data, int64_t index,
                                      const typename ComputeType<Element>::type (&values)[kSize]) {
  open::Packed<Element, kSize> packed;
  if constexpr (kSize > 1) {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) from_compute_pair<Element>(values + i, packed.values + i);
  } else {
    packed.values[0] = from_compute<Element>(values[0]);
  }
  bands::store_row(static_cast<Element*>(data), index, packed);
}

// --- D = epilogue(x) ------------------------------------------------------------------------------------------------

template <class Functor, class Element, int kSize>
__device__ __forceinline__ void apply_part(const ElementwiseArguments<Element>& p, int64_t row, int64_t column) {
  using Epilogue = EpilogueOf<Functor, Element, kSize>;
  constexpr int kRows = kRowsOfThread<Element>;
  const int count = p.frame.m - row < kRows ? static_cast<int>(p.frame.m - row) : kRows;
  open::Packed<Element, kSize> x[kRows];
  typename Epilogue::Row of_rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r < count) open::load<open::Access::Wide>(x[r], p.x, (row + r) * p.x_row_stride + column, kSize);
  }
  const Epilogue epilogue(p.operands, column, p.frame.n, p.frame.period, kIsAbsentNegative<Element>);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r < count) of_rows[r] = epilogue.row(row + r);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= count) break;
    typename Epilogue::Compute values[kSize], results[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = x[r].at(i);
    epilogue.apply(values, of_rows[r], results);
    store<Element, kSize>(p.out, (row + r) * p.out_row_stride + column, results);
  }
}

template <class Functor, class Element>
__device__ __forceinline__ void run_elementwise(const ElementwiseArguments<Element>& p) {
  for_thread_part<Element, kRowsOfThread<Element>>(p.frame, [&](auto size, int64_t row, int64_t column) {
    apply_part<Functor, Element, decltype(size)::value>(p, row, column);
  });
}

// --- derivatives ----------------------------------------------------------------------------------------------------

// A vector of what derivatives read beside the operands.
template <class Functor, class Element, int kSize>
struct DerivativeInputs {
  using Compute = typename ComputeType<Element>::type;
  open::Packed<Element, kSize> grad;
  open::Neighbours<Element, kSize> acc;
  int kind;  // of acc

  __device__ __forceinline__ void load(const DerivativeArguments<Element>& p, int64_t row, int64_t column) {
    kind = Functor::kReadsWideAccumulator && p.is_acc_of_compute ? open::kOfCompute : open::kOfElement;
    open::load<open::Access::Wide>(grad, p.grad, row * p.grad_row_stride + column, kSize);
    acc.template load<open::Access::Wide>(kind, p.acc, row * p.acc_row_stride + column, kSize);
  }
};

// Stores a vector of each gradient that is wanted. `add`: gets that of the accumulator, as it is stored.
template <class Functor, class Element, int kSize, class Epilogue, class Add>
__device__ __forceinline__ void differentiate(const DerivativeArguments<Element>& p, const Epilogue& epilogue,
                                              const DerivativeInputs<Functor, Element, kSize>& inputs,
                                              const typename Epilogue::Row& of_row, int64_t row, int64_t column,
                                              Add add) {
  using Compute = typename Epilogue::Compute;
  const int64_t index = row * p.frame.n + column;
#pragma unroll
  for (int slot = -1; slot < open::kSlots; ++slot) {
    if (slot >= 0 && Functor::operand(slot) == open::kUnread) continue;
    if (!p.out[1 + slot]) continue;
    Compute results[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      results[i] = epilogue.derivative(inputs.grad.at(i), inputs.acc.at(inputs.kind, i), of_row, i, slot);
    }
    if (p.is_out_of_compute[1 + slot]) {
      store<Compute, kSize>(p.out[1 + slot], index, results);
    } else {
      store<Element, kSize>(p.out[1 + slot], index, results);
    }
    if (slot == -1) add(results);
  }
}

template <class Functor, class Element>
__device__ __forceinline__ void run_derivative(const DerivativeArguments<Element>& p) {
  for_thread_part<Element, 1>(p.frame, [&](auto size, int64_t row, int64_t column) {
    constexpr int kSize = decltype(size)::value;
    DerivativeInputs<Functor, Element, kSize> inputs;
    inputs.load(p, row, column);
    const EpilogueOf<Functor, Element, kSize> epilogue(p.operands, column, p.frame.n, p.frame.period,
                                                       kIsAbsentNegative<Element>);
    const auto of_row = epilogue.row(row);
    differentiate(p, epilogue, inputs, of_row, row, column, [](auto&) {});
  });
}

// One that also sums the columns of the accumulator's gradient, over the rows of each CTA (bands.cuh). All rows are
// whole vectors. Two rows of grad and acc of each thread of three CTAs are 48 KB of loads in flight on a
// multiprocessor.
constexpr int kSumWarps = kThreads / bands::kLanes, kSumRows = 2;

template <class Functor, class Element>
__device__ __forceinline__ void run_derivative_sums(const DerivativeArguments<Element>& p) {
  using Compute = typename ComputeType<Element>::type;
  using Epilogue = EpilogueOf<Functor, Element, kWidth<Element>>;
  constexpr int kSize = kWidth<Element>, kBand = bands::kBand<kSize>;
  __shared__ Compute shared[kSumWarps][kBand];
  const bands::Place place = bands::place_of(p.frame.m, p.frame.n, kBand, p.rows_of_part);
  const int own = static_cast<int>(threadIdx.x), lane = own % bands::kLanes, warp = own / bands::kLanes;
  const int64_t column = place.first_column + lane * kSize;
  Compute sums[kSize] = {};
  if (column < p.frame.n) {
    const Epilogue epilogue(p.operands, column, p.frame.n, /*period=*/0, kIsAbsentNegative<Element>);
#pragma unroll 1
    for (int64_t first = place.first_row + warp; first < place.end_row; first += kSumRows * kSumWarps) {
      DerivativeInputs<Functor, Element, kSize> inputs[kSumRows];
      typename Epilogue::Row of_rows[kSumRows];
#pragma unroll
      for (int i = 0; i < kSumRows; ++i) {
        const int64_t row = first + i * kSumWarps;
        if (row >= place.end_row) break;
        inputs[i].load(p, row, column);
        of_rows[i] = epilogue.row(row);
      }
#pragma unroll
      for (int i = 0; i < kSumRows; ++i) {
        const int64_t row = first + i * kSumWarps;
        if (row >= place.end_row) break;
        differentiate(p, epilogue, inputs[i], of_rows[i], row, column, [&](const Compute(&found)[kSize]) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) {
            sums[j] += p.is_out_of_compute[0] ? found[j] : to_compute(from_compute<Element>(found[j]));
          }
        });
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) shared[warp][lane * kSize + j] = sums[j];
  __syncthreads();
  if (own >= kBand || place.first_column + own >= p.frame.n) return;
  Compute total = 0;
#pragma unroll
  for (int i = 0; i < kSumWarps; ++i) total += shared[i][own];
  const int64_t part = place.first_row / p.rows_of_part;
  static_cast<Compute*>(p.partial_sums)[part * p.frame.n + place.first_column + own] = total;
}

}  // namespace epigemm::cuda
