// Programmatic dependent launch, from the sides of the kernel ahead and of the one behind it.
#pragma once

namespace epigemm::cuda {

// The GEMM behind may begin its set-up at once; it waits for this kernel's results itself.
__device__ __forceinline__ void let_dependents_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Until the results of the kernel ahead are there. Without a dependent launch it does nothing.
__device__ __forceinline__ void wait_for_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace epigemm::cuda
