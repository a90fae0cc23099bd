// The symbol of an open kernel, by which the host finds it in the linker's output.
#pragma once

#define EPIGEMM_OPEN_KERNEL(symbol, Gemm)                                                                  \
  extern "C" __global__ void __launch_bounds__(Gemm::MaxThreadsPerBlock, Gemm::MinBlocksPerMultiprocessor) \
      symbol(__grid_constant__ const typename Gemm::Params params) {                                       \
    extern __shared__ char shared[];                                                                       \
    Gemm kernel;                                                                                           \
    kernel(params, shared);                                                                                \
  }
