# For every GPU since Ampere, and in 16 bits alone. A unit of ten tiles takes 36 s and has 160 KB of IR.
foreach(element float16 bfloat16)
  set(prefix epigemm_open_sm80_mma_${element}_)
  epigemm_symbols(symbols 10 ${prefix} "")
  epigemm_open_kernel(epigemm_open_sm80_mma_${element} gemm/sm80_mma/open_unit.cu.in ARCH lto_80 CUTLASS
                      SYMBOLS ${symbols} DEFINITIONS EPIGEMM_ELEMENT=${element} EPIGEMM_PREFIX=${prefix})
endforeach()
