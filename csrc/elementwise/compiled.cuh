// The kernels of a functor that is compiled with the package.
#pragma once

#include "elementwise/functor.cuh"
#include "elementwise/kernel.cuh"
#include "elementwise/kernels.h"
#include "elementwise/strided.cuh"

namespace epigemm::cuda {

template <class Functor>
constexpr bool reads_wide_columns() {
  for (int i = 0; i < Functor::operands.size(); ++i) {
    const Operand& operand = Functor::operands[i];
    if (operand.kind == OperandKind::PerColumn && operand.element == OperandElement::Compute) return true;
  }
  return false;
}

// Of a matrix as a whole. Two rows are for vectors in fp32 alone: without them sigmoid_scale_residual takes 10% longer
// in 16 bits (H200).
template <class Functor, class Element>
constexpr int kRowsOfWhole = reads_wide_columns<Functor>() ? kRowsOfThread<Element> : 1;

// Five blocks a multiprocessor keep enough loads in flight where a thread has two rows. With the registers of two
// folded vectors there would be four.
template <int Rows>
constexpr int kBlocks = Rows == 2 ? 5 : 0;  // 0: as many as the compiler thinks best

template <class Functor, class Element, Parts parts>
__global__ void __launch_bounds__(kThreads, kBlocks<kRowsOfWhole<Functor, Element>>)
    elementwise_kernel(const __grid_constant__ ElementwiseArguments<Element> p) {
  constexpr int kRows = parts == Parts::Whole ? kRowsOfWhole<Functor, Element> : 1;
  run_elementwise<Compiled<Functor, Element>, parts, Element, kRows>(p);
}

template <class Functor, class Element, Parts parts>
__global__ void __launch_bounds__(kThreads) derivative_kernel(const __grid_constant__ DerivativeArguments<Element> p) {
  run_derivative<Compiled<Functor, Element>, parts>(p);
}

// In fp64 the registers of three blocks would not do.
template <class Functor, class Element>
__global__ void __launch_bounds__(kThreads, sizeof(Element) == 8 ? 1 : 3)
    derivative_sums_kernel(const __grid_constant__ DerivativeArguments<Element> p) {
  run_derivative_sums<Compiled<Functor, Element>, Parts::Whole>(p);
}

template <class Functor, class Element, class Linear>
__global__ void __launch_bounds__(kThreads) strided_kernel(const __grid_constant__ StridedArguments<Element> p) {
  run_strided<Compiled<Functor, Element>, Linear>(p);
}

template <class Arguments>
KernelForms forms(void (*any)(Arguments), void (*most)(Arguments), int rows_of_most = 1) {
  return {reinterpret_cast<const void*>(any), reinterpret_cast<const void*>(most), rows_of_most};
}

template <class Functor>
KernelForms kernel_of(ElementwiseKernel which, ElementType element) {
  return with_element_type(element, [&](auto example) {
    using Element = decltype(example);
    switch (which) {
      case ElementwiseKernel::Value:
        return forms(&elementwise_kernel<Functor, Element, Parts::Any>,
                     &elementwise_kernel<Functor, Element, Parts::Whole>, kRowsOfWhole<Functor, Element>);
      case ElementwiseKernel::Derivative:
        return forms(&derivative_kernel<Functor, Element, Parts::Any>,
                     &derivative_kernel<Functor, Element, Parts::Whole>);
      case ElementwiseKernel::DerivativeSums:
        return forms(&derivative_sums_kernel<Functor, Element>, &derivative_sums_kernel<Functor, Element>);
      default:
        return forms(&strided_kernel<Functor, Element, uint64_t>, &strided_kernel<Functor, Element, uint32_t>);
    }
  });
}

}  // namespace epigemm::cuda
