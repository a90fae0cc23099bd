// D = epilogue(x) on CUDA: one kernel for contiguous problems, bound by memory alone, and one for every other layout.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "elementwise/launch.h"
#include "elementwise/operands.cuh"
#include "elementwise/problem.h"
#include "epilogue/rounded.h"

namespace epigemm::cuda {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;  // the widest access of a thread

template <class Element>
struct alignas(kVectorBytes) Vector {
  static constexpr int kSize = kVectorBytes / sizeof(Element);
  Element values[kSize];
};

// How a contiguous problem reads its per-column operands.
enum class Columns {
  None,       // all absent: zeros, known to the compiler
  Aligned,    // every vector of x starts at a multiple of its length within a row: wide loads
  Unaligned,  // the column wraps around inside a vector: element by element
};

// The type in which functors compute: fp64 for fp64, a type of epilogue/rounded.h where the result has 16 bits, else
// fp32.
template <class Element>
struct ArgumentOf {
  using type = std::conditional_t<sizeof(Element) == 2, Rounded, typename ComputeType<Element>::type>;
};
template <>
struct ArgumentOf<__nv_bfloat16> {
  using type = RoundedToBFloat16;
};
template <class Element>
using Argument = typename ArgumentOf<Element>::type;

template <class Functor, class Element, class... Values>
__device__ __forceinline__ typename ComputeType<Element>::type apply(typename ComputeType<Element>::type accumulator,
                                                                     Values... values) {
  using Compute = typename ComputeType<Element>::type;
  return static_cast<Compute>(
      Functor::apply(Argument<Element>(accumulator), static_cast<Argument<Element>>(values)...));
}

// Replaces an absent vector. Beside 16-bit elements x + -0 is x for every x, so the compiler may drop the addition.
// With +0 the sign of a zero would depend on whether it does.
template <class Element>
constexpr __device__ typename ComputeType<Element>::type absent() {
  using Compute = typename ComputeType<Element>::type;
  return sizeof(Element) == 2 ? Compute(-0.0) : Compute(0);
}

template <class Functor, class Element, int Index, class Compute>
__device__ __forceinline__ Compute load_or_absent(const Operands<Compute>& operands, int64_t offset) {
  constexpr bool kVector = OperandTraits<Functor, Element, Index>::operand.kind == OperandKind::PerColumn;
  if (kVector && !operands.data[Index - 1]) return absent<Element>();
  return load_operand<Functor, Element, Index>(operands, offset);
}

// The values of one operand at kSize consecutive columns.
template <class Functor, class Element, int Index, Columns Mode>
struct OperandVector {
  using Traits = OperandTraits<Functor, Element, Index>;
  using Compute = typename Traits::Compute;
  static constexpr int kSize = Vector<Element>::kSize;
  Compute values[kSize];

  __device__ __forceinline__ OperandVector(const Operands<Compute>& operands, uint32_t column, uint32_t columns) {
    if constexpr (Traits::operand.kind == OperandKind::Scalar) {
      fill(load_operand<Functor, Element, Index>(operands, 0));
    } else if constexpr (Mode == Columns::None) {
      fill(absent<Element>());
    } else if constexpr (Mode == Columns::Aligned) {
      load_wide(operands.data[Index - 1], column);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        values[i] = load_or_absent<Functor, Element, Index>(operands, column);
        if (++column == columns) column = 0;
      }
    }
  }

 private:
  __device__ __forceinline__ void fill(Compute value) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = value;
  }

  __device__ __forceinline__ void load_wide(const void* data, uint32_t column) {
    using Stored = typename Traits::Stored;
    struct alignas(sizeof(Stored) * kSize < kVectorBytes ? sizeof(Stored) * kSize : kVectorBytes) Wide {
      Stored values[kSize];
    };
    if (!data) return fill(absent<Element>());
    const Wide wide = *reinterpret_cast<const Wide*>(static_cast<const Stored*>(data) + column);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = to_compute(wide.values[i]);
  }
};

// All operands of kSize consecutive columns, loaded once, applied to any number of rows.
template <class Functor, class Element, Columns Mode, class Indices = OperandIndices<Functor>>
struct VectorEpilogue;

template <class Functor, class Element, Columns Mode, int... Index>
struct VectorEpilogue<Functor, Element, Mode, std::integer_sequence<int, Index...>>
    : OperandVector<Functor, Element, Index + 1, Mode>... {
  using Compute = typename ComputeType<Element>::type;

  __device__ __forceinline__ VectorEpilogue(const Operands<Compute>& operands, uint32_t column, uint32_t columns)
      : OperandVector<Functor, Element, Index + 1, Mode>(operands, column, columns)... {}

  __device__ __forceinline__ Vector<Element> operator()(const Vector<Element>& x) const {
    Compute values[Vector<Element>::kSize];
    Vector<Element> out;
#pragma unroll
    for (int i = 0; i < Vector<Element>::kSize; i += 2) to_compute_pair(x.values + i, values + i);
#pragma unroll
    for (int i = 0; i < Vector<Element>::kSize; ++i) {
      values[i] = apply<Functor, Element>(values[i], OperandVector<Functor, Element, Index + 1, Mode>::values[i]...);
    }
#pragma unroll
    for (int i = 0; i < Vector<Element>::kSize; i += 2) from_compute_pair<Element>(values + i, out.values + i);
    return out;
  }
};

// index / count and index % count without a division: with inverse = floor(2^64 / count) the estimated quotient is at
// most one too small, because its error is below index / 2^64.
struct Divider {
  uint32_t count;
  uint64_t inverse;

  explicit Divider(int64_t count)
      : count(static_cast<uint32_t>(count)), inverse(UINT64_MAX / static_cast<uint64_t>(count)) {}

  __device__ __forceinline__ int64_t divide(int64_t index, uint32_t& remainder) const {
    uint64_t quotient = __umul64hi(static_cast<uint64_t>(index), inverse);
    remainder = static_cast<uint32_t>(static_cast<uint64_t>(index) - quotient * count);
    if (remainder >= count) {
      remainder -= count;
      ++quotient;
    }
    return static_cast<int64_t>(quotient);
  }
};

// One element, its operands read where `offset_of` says.
template <class Functor, class Element, class Compute, class OffsetOf, int... Index>
__device__ __forceinline__ Element apply_one(Element x, const Operands<Compute>& operands, OffsetOf offset_of,
                                             std::integer_sequence<int, Index...>) {
  return from_compute<Element>(apply<Functor, Element>(
      to_compute(x), load_or_absent<Functor, Element, Index + 1>(operands, offset_of(Index))...));
}

// What remains after the last whole vector.
template <class Functor, class Element, class Compute>
__device__ __forceinline__ void finish_elements(const Element* x, Element* out, int elements, uint32_t column,
                                                uint32_t columns, const Operands<Compute>& operands) {
#pragma unroll 1
  for (int i = 0; i < elements; ++i) {
    out[i] = apply_one<Functor>(x[i], operands, [column](int) { return column; }, OperandIndices<Functor>{});
    if (++column == columns) column = 0;
  }
}

// x and out contiguous and 16-byte aligned, as one run of elements. One vector a thread: more in flight gained nothing
// on an H200 and lost 2% on fp32, since eight blocks a multiprocessor already keep its memory busy. The last elements
// have a path of their own, or every vector would be taken apart and put together again where the paths join.
template <class Functor, class Element, Columns Mode>
__global__ void __launch_bounds__(kThreads)
    contiguous_kernel(const Element* x, Element* out, int64_t elements, Divider columns,
                      Operands<typename ComputeType<Element>::type> operands) {
  constexpr int kSize = Vector<Element>::kSize;
  const int64_t index = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kSize;
  if (index >= elements) return;
  uint32_t column = 0;
  if constexpr (Mode != Columns::None) columns.divide(index, column);
  if constexpr (Mode != Columns::Aligned) {  // whose rows are whole vectors
    if (index + kSize > elements) {
      const int rest = static_cast<int>(elements - index);
      return finish_elements<Functor>(x + index, out + index, rest, column, columns.count, operands);
    }
  }
  const auto vector = *reinterpret_cast<const Vector<Element>*>(x + index);
  const VectorEpilogue<Functor, Element, Mode> epilogue(operands, column, columns.count);
  *reinterpret_cast<Vector<Element>*>(out + index) = epilogue(vector);
}

// As above for 16-bit elements with wide per-column operands: each thread applies those of its columns to kRows rows.
// An fp32 vector beside bf16 elements is twice their bytes; read once per row it would come from L2 twice as often as x
// from memory. Five blocks a multiprocessor keep enough loads in flight; with the registers of two folded vectors there
// would be four. Four rows are 1% slower, eight 2%; beside fp32 elements two already are, by 1%, for the longer stride
// between a thread's rows costs more than it saves (H200).
constexpr int kRows = 2;

template <class Functor, class Element>
__global__ void __launch_bounds__(kThreads, 5)
    rows_kernel(const Element* x, Element* out, int64_t rows, Divider vectors,
                Operands<typename ComputeType<Element>::type> operands) {
  constexpr int kSize = Vector<Element>::kSize;
  uint32_t vector_in_row = 0;
  const int64_t first_row = kRows * vectors.divide(int64_t(blockIdx.x) * kThreads + threadIdx.x, vector_in_row);
  if (first_row >= rows) return;
  const int64_t offset = (first_row * vectors.count + vector_in_row) * kSize;
  const int64_t row_stride = int64_t(vectors.count) * kSize;
  const int count = rows - first_row < kRows ? static_cast<int>(rows - first_row) : kRows;
  Vector<Element> values[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i < count) values[i] = *reinterpret_cast<const Vector<Element>*>(x + offset + i * row_stride);
  }
  const VectorEpilogue<Functor, Element, Columns::Aligned> epilogue(operands, vector_in_row * kSize, 0);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i < count) *reinterpret_cast<Vector<Element>*>(out + offset + i * row_stride) = epilogue(values[i]);
  }
}

struct StridedIndex {
  int dimensions;
  int64_t sizes[kMaxDimensions];
  int64_t strides[ElementwiseProblem::kTensors][kMaxDimensions];
};

// Any layout: one thread an element, its offsets by division. `Linear` is 32 bits where the element count allows:
// 64-bit division costs three times as much.
template <class Functor, class Element, class Linear>
__global__ void __launch_bounds__(kThreads)
    strided_kernel(const Element* x, Element* out, Linear elements, __grid_constant__ const StridedIndex index,
                   Operands<typename ComputeType<Element>::type> operands) {
  constexpr int kTensors = ElementwiseProblem::kFirstOperand + static_cast<int>(Functor::operands.size()) - 1;
  for (Linear i = Linear(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += Linear(gridDim.x) * kThreads) {
    int64_t offsets[kTensors] = {};
    Linear rest = i;
    for (int axis = index.dimensions - 1; axis >= 0; --axis) {
      const Linear size = static_cast<Linear>(index.sizes[axis]);
      const Linear quotient = rest / size;
      const int64_t coordinate = rest - quotient * size;
      rest = quotient;
#pragma unroll
      for (int tensor = 0; tensor < kTensors; ++tensor) offsets[tensor] += coordinate * index.strides[tensor][axis];
    }
    out[offsets[ElementwiseProblem::kOut]] = apply_one<Functor>(
        x[offsets[ElementwiseProblem::kX]], operands,
        [&offsets](int operand) { return offsets[ElementwiseProblem::kFirstOperand + operand]; },
        OperandIndices<Functor>{});
  }
}

inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0; }

// The kernels count columns in 32 bits.
constexpr int64_t kLargestPeriod = int64_t(1) << 30;

inline bool has_vectors(const ElementwiseProblem& problem) {
  const EpilogueInfo& epilogue = epilogue_info(problem.epilogue);
  for (int i = 1; i < epilogue.operand_count; ++i) {
    if (epilogue.operands[i].kind == OperandKind::PerColumn && problem.operands[i - 1].data) return true;
  }
  return false;
}

inline unsigned blocks_for(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

template <class Functor, class Element, class Compute>
void launch_contiguous(const ElementwiseProblem& problem, const Operands<Compute>& operands) {
  constexpr int kSize = Vector<Element>::kSize;
  const auto stream = static_cast<cudaStream_t>(problem.stream);
  const auto* x = static_cast<const Element*>(problem.x);
  auto* out = static_cast<Element*>(problem.out);
  const int64_t elements = problem.elements();
  const unsigned blocks = blocks_for((elements + kSize - 1) / kSize);
  if constexpr (reads<Functor>(OperandKind::PerColumn)) {
    if (has_vectors(problem)) {
      const int64_t columns = problem.sizes[problem.dimensions - 1];
      bool wide = columns % kSize == 0;
      for (const void* data : operands.data) wide = wide && aligned(data);
      if (!wide) {
        contiguous_kernel<Functor, Element, Columns::Unaligned>
            <<<blocks, kThreads, 0, stream>>>(x, out, elements, Divider(columns), operands);
      } else if constexpr (sizeof(Element) == 2) {
        const int64_t rows = elements / columns, vectors = columns / kSize;
        rows_kernel<Functor, Element><<<blocks_for((rows + kRows - 1) / kRows * vectors), kThreads, 0, stream>>>(
            x, out, rows, Divider(vectors), operands);
      } else {
        contiguous_kernel<Functor, Element, Columns::Aligned>
            <<<blocks, kThreads, 0, stream>>>(x, out, elements, Divider(columns), operands);
      }
      return;
    }
  }
  contiguous_kernel<Functor, Element, Columns::None>
      <<<blocks, kThreads, 0, stream>>>(x, out, elements, Divider(1), operands);
}

template <class Functor, class Element, class Compute>
void launch_strided(const ElementwiseProblem& problem, const Operands<Compute>& operands) {
  StridedIndex index;
  index.dimensions = problem.dimensions;
  std::copy_n(problem.sizes, problem.dimensions, index.sizes);
  for (int tensor = 0; tensor < ElementwiseProblem::kTensors; ++tensor) {
    std::copy_n(problem.strides[tensor], problem.dimensions, index.strides[tensor]);
  }
  const int64_t elements = problem.elements();
  const int64_t wanted = (elements + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(wanted, int64_t(problem.multiprocessors) * 32));
  const auto launch = [&](auto linear) {
    using Linear = decltype(linear);
    strided_kernel<Functor, Element, Linear><<<blocks, kThreads, 0, static_cast<cudaStream_t>(problem.stream)>>>(
        static_cast<const Element*>(problem.x), static_cast<Element*>(problem.out), static_cast<Linear>(elements),
        index, operands);
  };
  // A grid's stride beyond the last element must not wrap around.
  if (elements < (int64_t(1) << 31)) {
    launch(uint32_t{});
  } else {
    launch(uint64_t{});
  }
}

template <class Functor, class Element>
void launch_element(const ElementwiseProblem& problem) {
  using Compute = typename ComputeType<Element>::type;
  Operands<Compute> operands{};
  for (int i = 1; i < Functor::operands.size(); ++i) {
    operands.data[i - 1] = problem.operands[i - 1].data;
    operands.values[i - 1] = static_cast<Compute>(problem.operands[i - 1].value);
  }
  const bool wide = is_contiguous(problem) && aligned(problem.x) && aligned(problem.out) &&
                    (!has_vectors(problem) || problem.sizes[problem.dimensions - 1] <= kLargestPeriod);
  if (wide) {
    launch_contiguous<Functor, Element>(problem, operands);
  } else {
    launch_strided<Functor, Element>(problem, operands);
  }
}

template <class Functor>
void launch_elementwise(const ElementwiseProblem& problem) {
  with_element_type(problem.element, [&](auto element) { launch_element<Functor, decltype(element)>(problem); });
}

}  // namespace epigemm::cuda
