# For every GPU since Ampere. A unit of ten tiles in 16 bits takes 36 s and has 160 KB of IR; that of three tiles in TF32
# takes 22 s of one core and has 65 KB.
foreach(element_tiles float16=10 bfloat16=10 tf32=3)
  string(REPLACE "=" ";" element_tiles ${element_tiles})
  list(GET element_tiles 0 element)
  list(GET element_tiles 1 tiles)
  set(prefix epigemm_open_sm80_mma_${element}_)
  epigemm_symbols(symbols ${tiles} ${prefix} "")
  epigemm_open_kernel(
    epigemm_open_sm80_mma_${element} gemm/sm80_mma/open_unit.cu.in ARCH lto_80 CUTLASS SYMBOLS ${symbols}
    DEFINITIONS EPIGEMM_ELEMENT=${element} EPIGEMM_PREFIX=${prefix} EPIGEMM_TILES=${tiles})
endforeach()
