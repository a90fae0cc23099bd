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
  Tiling tiling;
  Divider period;  // the columns of the matrix, if its rows are taken as one row
  bool is_wide;    // every row of every matrix, and every vector of columns, begins at a multiple of kVectorBytes
};

// Which matrices a kernel takes.
enum class Parts {
  // Whose rows are whole vectors, one behind the other without gaps, and fewer than 2^31 in a row. A derivative's gives
  // the accumulator's gradient, and no other.
  Whole,
  Any,
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

// A thread's part of a matrix.
template <Parts parts>
struct Part {
  int64_t row, column;
  int64_t index;  // where it begins in a matrix without gaps

  // Where its row `r` begins in a matrix with this stride.
  __device__ __forceinline__ int64_t at(const Frame& frame, int r, int64_t row_stride) const {
    return parts == Parts::Whole ? index + r * frame.n : (row + r) * row_stride + column;
  }
};

// The epilogue at a column and those behind it.
template <class Epilogue, Parts parts>
__device__ __forceinline__ Epilogue epilogue_at(const typename Epilogue::Operands& operands, const Frame& frame,
                                                int64_t column, bool is_absent_negative) {
  open::Wrapped wrapped;
  if (parts == Parts::Any && frame.period.count) {
    wrapped.count = static_cast<uint32_t>(frame.period.count);
    frame.period.divide(column, wrapped.first);
  }
  return Epilogue(operands, column, frame.n, wrapped, is_absent_negative);
}

// Calls body(size, part) for a thread's part: once for a whole vector, else for every element.
template <class Element, Parts parts, int kRows, class Body>
__device__ __forceinline__ void for_thread_part(const Frame& frame, Body body) {
  constexpr int kSize = kWidth<Element>;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (thread >= frame.tiling.threads) return;
  if constexpr (parts == Parts::Whole) {
    const Place place = frame.tiling.place_of<uint32_t>(thread, kSize, kRows);
    const int64_t index = kRows == 1 ? thread * kSize : place.row * frame.n + place.column;
    return body(std::integral_constant<int, kSize>{}, Part<parts>{place.row, place.column, index});
  } else {
    const int width = frame.is_wide ? kSize : 1;
    const Place place = frame.tiling.place_of<uint64_t>(thread, width, kRows);
    if (frame.is_wide && place.column + kSize <= frame.n) {
      return body(std::integral_constant<int, kSize>{}, Part<parts>{place.row, place.column});
    }
    const int64_t end = place.column + width < frame.n ? place.column + width : frame.n;
#pragma unroll 1
    for (int64_t column = place.column; column < end; ++column) {
      body(std::integral_constant<int, 1>{}, Part<parts>{place.row, column});
    }
  }
}

// Returns what it stores.
template <class Element, int kSize>
__device__ __forceinline__ open::Packed<Element, kSize> store(
    void* data, int64_t index, const typename ComputeType<Element>::type (&values)[kSize]) {
  open::Packed<Element, kSize> packed;
  if constexpr (kSize > 1) {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) from_compute_pair<Element>(values + i, packed.values + i);
  } else {
    packed.values[0] = from_compute<Element>(values[0]);
  }
  bands::store_row(static_cast<Element*>(data), index, packed);
  return packed;
}

// --- D = epilogue(x) ------------------------------------------------------------------------------------------------

template <class Functor, class Element, int kSize, int kRows, Parts parts>
__device__ __forceinline__ void apply_part(const ElementwiseArguments<Element>& p, const Part<parts>& part) {
  using Epilogue = EpilogueOf<Functor, Element, kSize>;
  const int count = kRows > 1 && p.frame.m - part.row < kRows ? static_cast<int>(p.frame.m - part.row) : kRows;
  open::Packed<Element, kSize> x[kRows];
  typename Epilogue::Row of_rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r < count) open::load<open::Access::Wide>(x[r], p.x, part.at(p.frame, r, p.x_row_stride), kSize);
  }
  const auto epilogue = epilogue_at<Epilogue, parts>(p.operands, p.frame, part.column, kIsAbsentNegative<Element>);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r < count) of_rows[r] = epilogue.row(part.row + r);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= count) break;
    typename Epilogue::Compute values[kSize], results[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = x[r].at(i);
    epilogue.apply(values, of_rows[r], results);
    store<Element, kSize>(p.out, part.at(p.frame, r, p.out_row_stride), results);
  }
}

template <class Functor, Parts parts, class Element, int kRows = kRowsOfThread<Element>>
__device__ __forceinline__ void run_elementwise(const ElementwiseArguments<Element>& p) {
  for_thread_part<Element, parts, kRows>(p.frame, [&](auto size, Part<parts> part) {
    apply_part<Functor, Element, decltype(size)::value, kRows>(p, part);
  });
}

// --- derivatives ----------------------------------------------------------------------------------------------------

// A vector of what derivatives read beside the operands.
template <class Functor, class Element, Parts parts, int kSize>
struct DerivativeInputs {
  using Compute = typename ComputeType<Element>::type;
  open::Packed<Element, kSize> grad;
  open::Neighbours<Element, kSize> acc;
  int kind;  // of acc

  __device__ __forceinline__ void load(const DerivativeArguments<Element>& p, const Part<parts>& part) {
    kind = Functor::kHasWideAccumulator && p.is_acc_of_compute ? open::kOfCompute : open::kOfElement;
    open::load<open::Access::Wide>(grad, p.grad, part.at(p.frame, 0, p.grad_row_stride), kSize);
    acc.template load<open::Access::Wide>(kind, p.acc, part.at(p.frame, 0, p.acc_row_stride), kSize);
  }
};

// Stores a vector of each gradient that is wanted. `add`: gets that of the accumulator, as it is stored.
template <class Functor, class Element, Parts parts, int kSize, class Epilogue, class Add>
__device__ __forceinline__ void differentiate(const DerivativeArguments<Element>& p, const Epilogue& epilogue,
                                              const DerivativeInputs<Functor, Element, parts, kSize>& inputs,
                                              const typename Epilogue::Row& of_row, const Part<parts>& part, Add add) {
  using Compute = typename Epilogue::Compute;
  const int64_t index = part.at(p.frame, 0, p.frame.n);
#pragma unroll
  for (int slot = -1; slot < open::kSlots; ++slot) {
    if (slot >= 0 && (parts == Parts::Whole || !Functor::is_derived(slot))) continue;
    if (parts != Parts::Whole && !p.out[1 + slot]) continue;
    Compute results[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      results[i] = epilogue.derivative(inputs.grad.at(i), inputs.acc.at(inputs.kind, i), of_row, i, slot);
    }
    if ((slot >= 0 || Functor::kHasWideAccumulator) && p.is_out_of_compute[1 + slot]) {
      const auto stored = store<Compute, kSize>(p.out[1 + slot], index, results);
      if (slot == -1) add(stored);
    } else {
      const auto stored = store<Element, kSize>(p.out[1 + slot], index, results);
      if (slot == -1) add(stored);
    }
  }
}

template <class Functor, Parts parts, class Element>
__device__ __forceinline__ void run_derivative(const DerivativeArguments<Element>& p) {
  for_thread_part<Element, parts, 1>(p.frame, [&](auto size, Part<parts> part) {
    constexpr int kSize = decltype(size)::value;
    DerivativeInputs<Functor, Element, parts, kSize> inputs;
    inputs.load(p, part);
    const auto epilogue = epilogue_at<EpilogueOf<Functor, Element, kSize>, parts>(p.operands, p.frame, part.column,
                                                                                  kIsAbsentNegative<Element>);
    differentiate(p, epilogue, inputs, epilogue.row(part.row), part, [](const auto&) {});
  });
}

// One that also sums the columns of the accumulator's gradient, over the rows of each CTA (bands.cuh). All rows are
// whole vectors. Two rows of grad and acc of each thread of three CTAs are 48 KB of loads in flight on a
// multiprocessor.
constexpr int kSumWarps = kThreads / bands::kLanes, kSumRows = 2;

template <class Functor, Parts parts, class Element>
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
    const Epilogue epilogue(p.operands, column, p.frame.n, {}, kIsAbsentNegative<Element>);
    const int64_t first = place.first_row + warp;
    Part<parts> part{first, column, first * p.frame.n + column};
    int left = static_cast<int>(place.end_row - first);
#pragma unroll 1
    for (; left > 0; left -= kSumRows * kSumWarps) {
      DerivativeInputs<Functor, Element, parts, kSize> inputs[kSumRows];
      typename Epilogue::Row of_rows[kSumRows];
      Part<parts> at[kSumRows];
#pragma unroll
      for (int i = 0; i < kSumRows; ++i) {
        at[i] = part;
        part.row += kSumWarps;
        part.index += kSumWarps * p.frame.n;
        if (i * kSumWarps >= left) continue;
        inputs[i].load(p, at[i]);
        of_rows[i] = epilogue.row(at[i].row);
      }
#pragma unroll
      for (int i = 0; i < kSumRows; ++i) {
        if (i * kSumWarps >= left) break;
        differentiate(p, epilogue, inputs[i], of_rows[i], at[i], [&](const auto& stored) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) sums[j] += stored.at(j);
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
