# The large tiles, in two units an element type: the compiler takes half as long and half the memory for each.
foreach(element IN LISTS EPIGEMM_GEMM_ELEMENTS)
  set(prefix epigemm_open_sm90_tma_${element}_)
  foreach(half RANGE 1)
    math(EXPR first "4 * ${half}")
    epigemm_symbols(symbols 7 ${prefix} "")
    list(SUBLIST symbols ${first} 4 symbols)
    epigemm_open_kernel(
      epigemm_open_sm90_tma_${element}_half${half} gemm/sm90_tma/open_unit.cu.in ARCH lto_90a CUTLASS
      SYMBOLS ${symbols} DEFINITIONS EPIGEMM_ELEMENT=${element} EPIGEMM_PREFIX=${prefix} EPIGEMM_HALF=${half})
  endforeach()
endforeach()
