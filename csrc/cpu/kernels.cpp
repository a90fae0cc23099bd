// Compiled once per instruction set, with EPIGEMM_CPU_LEVEL naming it (cmake/EpigemmUnits.cmake). Everything here has
// internal linkage but the table, so that the linker cannot merge code of different sets.
#include <algorithm>
#include <utility>

#include "cpu/types.h"
#include "elementwise/problem.h"
#include "epilogue/dual.h"  // before the functors

#include "epilogue/headers.h"

#define EPIGEMM_CONCATENATE_(a, b) a##b
#define EPIGEMM_CONCATENATE(a, b) EPIGEMM_CONCATENATE_(a, b)

namespace epigemm::cpu {
namespace {

// Elements that are converted, computed and converted back while they stay in the first-level cache.
constexpr int kBlock = 512;

template <class Functor, class Element>
struct Loop {
  using Compute = typename ComputeType<Element>::type;
  static constexpr int kOperands = static_cast<int>(Functor::operands.size()) - 1;

  template <int Index>
  using Stored = std::conditional_t<Functor::operands[Index + 1].element == OperandElement::Input, Element, Compute>;

  struct Buffers {
    alignas(64) Compute x[kBlock];
    alignas(64) Compute grad[kBlock];
    alignas(64) Compute operands[kOperands + 1][kBlock];
  };

  template <class Source>
  static void gather(const Source* source, int64_t stride, Compute* buffer, int count) {
    if (stride == 1) {
      for (int i = 0; i < count; ++i) buffer[i] = to_compute(source[i]);
    } else {
      for (int i = 0; i < count; ++i) buffer[i] = to_compute(source[i * stride]);
    }
  }

  static void scatter(const Compute* buffer, Element* out, int64_t stride, int count) {
    if (stride == 1) {
      for (int i = 0; i < count; ++i) out[i] = from_compute<Element>(buffer[i]);
    } else {
      for (int i = 0; i < count; ++i) out[i * stride] = from_compute<Element>(buffer[i]);
    }
  }

  template <int Index>
  static void gather_operand(const ElementwiseProblem& problem, int64_t offset, int64_t stride, Compute* buffer,
                             int count) {
    const OperandValue& value = problem.operands[Index];
    const auto* data = static_cast<const Stored<Index>*>(value.data);
    if constexpr (Functor::operands[Index + 1].kind == OperandKind::Scalar) {
      std::fill_n(buffer, count, data ? Compute(to_compute(*data)) : Compute(value.value));
    } else if (data) {
      gather(data + offset, stride, buffer, count);
    } else {
      std::fill_n(buffer, count, Compute(0));
    }
  }

  template <int... Index>
  static void compute(Buffers& buffers, int count, std::integer_sequence<int, Index...>) {
    for (int i = 0; i < count; ++i) {
      buffers.x[i] = Functor::apply(buffers.x[i], buffers.operands[Index][i]...);
    }
  }

  template <int... Index>
  static void differentiate(Buffers& buffers, int count, std::integer_sequence<int, Index...>) {
    using Number = Dual<Compute>;
    for (int i = 0; i < count; ++i) {
      const Number variable(buffers.x[i], buffers.grad[i]);
      buffers.x[i] = Functor::apply(variable, Number(buffers.operands[Index][i])...).derivative;
    }
  }

  // Elements [begin, end) of the derivative times grad, all tensors contiguous.
  template <int... Index>
  static void run_derivative(const DerivativeProblem& problem, int64_t begin, int64_t end,
                             std::integer_sequence<int, Index...> indices) {
    const int64_t row = problem.sizes[problem.dimensions - 1];
    Buffers buffers;
    for (int64_t i = begin; i < end;) {
      const int64_t column = i % row;
      const int count = static_cast<int>(std::min({end - i, row - column, int64_t(kBlock)}));
      gather(static_cast<const Element*>(problem.x) + i, 1, buffers.x, count);
      gather(static_cast<const Element*>(problem.grad) + i, 1, buffers.grad, count);
      (gather_operand<Index>(problem, column * problem.operands[Index].stride, problem.operands[Index].stride,
                             buffers.operands[Index], count),
       ...);
      differentiate(buffers, count, indices);
      scatter(buffers.x, static_cast<Element*>(problem.out) + i, 1, count);
      i += count;
    }
  }

  static void run_derivative(const DerivativeProblem& problem, int64_t begin, int64_t end) {
    run_derivative(problem, begin, end, std::make_integer_sequence<int, kOperands>{});
  }

  // `count` elements along the last axis, from the given offsets on.
  template <int... Index>
  static void block(const ElementwiseProblem& problem, const int64_t* offsets, int count,
                    std::integer_sequence<int, Index...> indices) {
    constexpr int kOut = ElementwiseProblem::kOut, kX = ElementwiseProblem::kX;
    constexpr int kFirstOperand = ElementwiseProblem::kFirstOperand;
    const int last = problem.dimensions - 1;
    Buffers buffers;
    gather(static_cast<const Element*>(problem.x) + offsets[kX], problem.strides[kX][last], buffers.x, count);
    (gather_operand<Index>(problem, offsets[kFirstOperand + Index], problem.strides[kFirstOperand + Index][last],
                           buffers.operands[Index], count),
     ...);
    compute(buffers, count, indices);
    scatter(buffers.x, static_cast<Element*>(problem.out) + offsets[kOut], problem.strides[kOut][last], count);
  }

  static void run(const ElementwiseProblem& problem, int64_t begin, int64_t end) {
    const int64_t row = problem.sizes[problem.dimensions - 1];
    for (int64_t i = begin; i < end;) {
      const int64_t count = std::min({end - i, row - i % row, int64_t(kBlock)});
      int64_t offsets[ElementwiseProblem::kTensors] = {};
      int64_t rest = i;
      for (int axis = problem.dimensions - 1; axis >= 0; --axis) {
        const int64_t coordinate = rest % problem.sizes[axis];
        rest /= problem.sizes[axis];
        for (int tensor = 0; tensor < ElementwiseProblem::kTensors; ++tensor) {
          offsets[tensor] += coordinate * problem.strides[tensor][axis];
        }
      }
      block(problem, offsets, static_cast<int>(count), std::make_integer_sequence<int, kOperands>{});
      i += count;
    }
  }
};

// Calls body with a value of the CPU type that `element` names.
template <class Body>
void with_element_type(ElementType element, Body body) {
  switch (element) {
    case ElementType::Float16:
      return body(Float16{});
    case ElementType::BFloat16:
      return body(BFloat16{});
    case ElementType::Float64:
      return body(double{});
    default:
      return body(float{});
  }
}

template <class Functor>
void run(const ElementwiseProblem& problem, int64_t begin, int64_t end) {
  with_element_type(problem.element, [&](auto element) { Loop<Functor, decltype(element)>::run(problem, begin, end); });
}

template <class Functor>
void run_derivative(const DerivativeProblem& problem, int64_t begin, int64_t end) {
  with_element_type(problem.element,
                    [&](auto element) { Loop<Functor, decltype(element)>::run_derivative(problem, begin, end); });
}

}  // namespace

struct Kernels {
  void (*forward)(const ElementwiseProblem&, int64_t, int64_t);
  void (*derivative)(const DerivativeProblem&, int64_t, int64_t);
};

extern const Kernels EPIGEMM_CONCATENATE(kernels_, EPIGEMM_CPU_LEVEL)[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms) {&run<Functor>, &run_derivative<Functor>},
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};

}  // namespace epigemm::cpu
