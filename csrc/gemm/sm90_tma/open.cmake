# The large tiles: without a matrix by TMA and with one, each in two units, or a compiler would take 10 GB.
foreach(element IN LISTS EPIGEMM_GEMM_ELEMENTS)
  foreach(suffix "" _matrix)
    set(prefix epigemm_open_sm90_tma_${element}_)
    set(by_tma false)
    if(suffix)
      set(by_tma true)
    endif()
    foreach(half RANGE 1)
      math(EXPR first "4 * ${half}")
      epigemm_symbols(symbols 7 ${prefix} "${suffix}")
      list(SUBLIST symbols ${first} 4 symbols)
      epigemm_open_kernel(
        epigemm_open_sm90_tma_${element}${suffix}_half${half} gemm/sm90_tma/open_unit.cu.in ARCH lto_90a CUTLASS
        SYMBOLS ${symbols}
        DEFINITIONS EPIGEMM_ELEMENT=${element} EPIGEMM_MATRIX=${by_tma} EPIGEMM_PREFIX=${prefix} EPIGEMM_SUFFIX=${suffix}
                    EPIGEMM_HALF=${half})
    endforeach()
  endforeach()
endforeach()
