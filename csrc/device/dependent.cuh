// Programmatic dependent launch, from the side of the kernel ahead.
#pragma once

namespace epigemm::cuda {

// The GEMM behind may begin its set-up at once; it waits for this kernel's results itself.
__device__ __forceinline__ void let_dependents_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace epigemm::cuda
