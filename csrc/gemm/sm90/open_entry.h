// The entry of an open kernel: a name that the host finds in what the linker made.
#pragma once

#define EPIGEMM_OPEN_KERNEL(symbol, Gemm)                                                                  \
  extern "C" __global__ void __launch_bounds__(Gemm::MaxThreadsPerBlock, Gemm::MinBlocksPerMultiprocessor) \
      symbol(__grid_constant__ const typename Gemm::Params params) {                                       \
    extern __shared__ char shared[];                                                                       \
    Gemm kernel;                                                                                           \
    kernel(params, shared);                                                                                \
  }
