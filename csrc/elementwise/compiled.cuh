// The kernels of a functor that is compiled with the package.
#pragma once

#include "elementwise/functor.cuh"
#include "elementwise/kernel.cuh"
#include "elementwise/kernels.h"
#include "elementwise/strided.cuh"

namespace epigemm::cuda {

// Five blocks a multiprocessor keep enough loads in flight beside 16-bit elements, of which a thread has two rows. With
// the registers of two folded vectors there would be four.
template <class Element>
constexpr int kBlocks = sizeof(Element) == 2 ? 5 : 0;  // 0: as many as the compiler thinks best

template <class Functor, class Element, Parts parts>
__global__ void __launch_bounds__(kThreads, kBlocks<Element>)
    elementwise_kernel(const __grid_constant__ ElementwiseArguments<Element> p) {
  constexpr int kRows = parts == Parts::Whole ? kRowsOfThread<Element> : 1;  // as launch_elementwise counts them
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
KernelForms forms(void (*any)(Arguments), void (*most)(Arguments)) {
  return {reinterpret_cast<const void*>(any), reinterpret_cast<const void*>(most)};
}

template <class Functor>
KernelForms kernel_of(ElementwiseKernel which, ElementType element) {
  return with_element_type(element, [&](auto example) {
    using Element = decltype(example);
    switch (which) {
      case ElementwiseKernel::Value:
        return forms(&elementwise_kernel<Functor, Element, Parts::Any>,
                     &elementwise_kernel<Functor, Element, Parts::Whole>);
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
