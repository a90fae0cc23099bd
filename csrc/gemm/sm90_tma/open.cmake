# The large tiles, in units of four or five: a compiler takes 40 seconds and 3 GB for each. The last two units are for
# 16 bits alone.
foreach(element IN LISTS EPIGEMM_GEMM_ELEMENTS)
  set(prefix epigemm_open_sm90_tma_${element}_)
  epigemm_symbols(symbols 18 ${prefix} "")
  set(unit 0)
  foreach(tiles "0;4" "4;4" "8;3" "11;5" "16;2")  # the first, how many
    list(GET tiles 0 first)
    list(GET tiles 1 count)
    list(SUBLIST symbols ${first} ${count} of_unit)
    if(NOT (element STREQUAL "tf32" AND unit GREATER 2))
      epigemm_open_kernel(
        epigemm_open_sm90_tma_${element}_unit${unit} gemm/sm90_tma/open_unit.cu.in ARCH lto_90a CUTLASS
        SYMBOLS ${of_unit} DEFINITIONS EPIGEMM_ELEMENT=${element} EPIGEMM_PREFIX=${prefix} EPIGEMM_UNIT=${unit})
    endif()
    math(EXPR unit "${unit} + 1")
  endforeach()
  # Pairs of products.
  if(NOT element STREQUAL "tf32")
    epigemm_symbols(symbols 4 ${prefix} _pair)
    epigemm_open_kernel(epigemm_open_sm90_tma_${element}_pair gemm/sm90_tma/open_pair_unit.cu.in ARCH lto_90a CUTLASS
                        SYMBOLS ${symbols} DEFINITIONS EPIGEMM_ELEMENT=${element} EPIGEMM_PREFIX=${prefix})
  endif()
endforeach()
