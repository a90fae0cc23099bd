// The kernels of a functor that is compiled with the package.
#pragma once

#include "elementwise/functor.cuh"
#include "elementwise/kernel.cuh"
#include "elementwise/kernels.h"
#include "elementwise/strided.cuh"

namespace epigemm::cuda {

// So many blocks a multiprocessor keep enough loads in flight. Beside 16-bit elements a thread has two rows, if there
// are vectors of columns; else all rows are one.
template <class Functor, class Element>
constexpr int kBlocks = sizeof(Element) > 2                      ? 1
                        : reads<Functor>(OperandKind::PerColumn) ? 6
                                                                 : 8;

template <class Functor, class Element>
__global__ void __launch_bounds__(kThreads, kBlocks<Functor, Element>)
    elementwise_kernel(const __grid_constant__ ElementwiseArguments<Element> p) {
  run_elementwise<Compiled<Functor, Element>>(p);
}

template <class Functor, class Element>
__global__ void __launch_bounds__(kThreads) derivative_kernel(const __grid_constant__ DerivativeArguments<Element> p) {
  run_derivative<Compiled<Functor, Element>>(p);
}

// In fp64 the registers of three blocks would not do.
template <class Functor, class Element>
__global__ void __launch_bounds__(kThreads, sizeof(Element) == 8 ? 1 : 3)
    derivative_sums_kernel(const __grid_constant__ DerivativeArguments<Element> p) {
  run_derivative_sums<Compiled<Functor, Element>>(p);
}

template <class Functor, class Element>
__global__ void __launch_bounds__(kThreads) strided_kernel(const __grid_constant__ StridedArguments<Element> p) {
  run_strided<Compiled<Functor, Element>>(p);
}

template <class Functor>
const void* kernel_of(ElementwiseKernel which, ElementType element) {
  return with_element_type(element, [&](auto example) -> const void* {
    using Element = decltype(example);
    switch (which) {
      case ElementwiseKernel::Value:
        return reinterpret_cast<const void*>(&elementwise_kernel<Functor, Element>);
      case ElementwiseKernel::Derivative:
        return reinterpret_cast<const void*>(&derivative_kernel<Functor, Element>);
      case ElementwiseKernel::DerivativeSums:
        return reinterpret_cast<const void*>(&derivative_sums_kernel<Functor, Element>);
      default:
        return reinterpret_cast<const void*>(&strided_kernel<Functor, Element>);
    }
  });
}

}  // namespace epigemm::cuda
