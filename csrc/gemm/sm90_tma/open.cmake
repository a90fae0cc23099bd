# The large tiles, in two units an element type: the compiler takes half as long and half the memory for each. The last
# tile is for 16 bits alone.
foreach(element IN LISTS EPIGEMM_GEMM_ELEMENTS)
  set(prefix epigemm_open_sm90_tma_${element}_)
  set(tiles 9)
  if(element STREQUAL "tf32")
    set(tiles 8)
  endif()
  foreach(half RANGE 1)
    math(EXPR first "4 * ${half}")
    math(EXPR count "4 + ${half} * (${tiles} - 8)")
    epigemm_symbols(symbols ${tiles} ${prefix} "")
    list(SUBLIST symbols ${first} ${count} symbols)
    epigemm_open_kernel(
      epigemm_open_sm90_tma_${element}_half${half} gemm/sm90_tma/open_unit.cu.in ARCH lto_90a CUTLASS
      SYMBOLS ${symbols}
      DEFINITIONS EPIGEMM_ELEMENT=${element} EPIGEMM_PREFIX=${prefix} EPIGEMM_HALF=${half} EPIGEMM_TILES=${tiles})
  endforeach()
endforeach()
