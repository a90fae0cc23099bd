foreach(element IN LISTS EPIGEMM_GEMM_ELEMENTS)
  set(prefix epigemm_open_sm90_swap_ab_${element}_)
  epigemm_symbols(symbols 8 ${prefix} "")
  epigemm_open_kernel(epigemm_open_sm90_swap_ab_${element} gemm/sm90_swap_ab/open_unit.cu.in ARCH lto_90a CUTLASS
                      SYMBOLS ${symbols} DEFINITIONS EPIGEMM_ELEMENT=${element} EPIGEMM_PREFIX=${prefix})
endforeach()
