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

# 8 bits: fast and promoted sums beside each other, two tiles of each to begin with. The types of x and the weight; then
# the number of units, the first for all results, of which bf16 has two more.
foreach(multiplied "e4m3;e4m3;2" "e5m2;e4m3;1" "e4m3;e5m2;1")
  list(GET multiplied 0 x)
  list(GET multiplied 1 weight)
  list(GET multiplied 2 units)
  foreach(result float16 bfloat16 float32)
    set(prefix epigemm_open_sm90_tma_${x}_${weight}_${result}_)
    set(tiles "fast_0;fast_1;promoted_0;promoted_1" "fast_2;fast_3;promoted_2;promoted_3"
              "fast_4;fast_5;fast_6;promoted_4" "fast_7;fast_8;fast_9;promoted_5")
    math(EXPR last "${units} - 1")
    if(units EQUAL 2 AND result STREQUAL bfloat16)
      set(last 3)
    endif()
    foreach(unit RANGE ${last})
      math(EXPR first "4 * ${unit}")
      list(SUBLIST tiles ${first} 4 symbols)
      list(TRANSFORM symbols PREPEND ${prefix})
      epigemm_open_kernel(
        ${prefix}unit${unit} gemm/sm90_tma/open_eight_bits_unit.cu.in ARCH lto_90a CUTLASS SYMBOLS ${symbols}
        DEFINITIONS EPIGEMM_X=${x} EPIGEMM_WEIGHT=${weight} EPIGEMM_RESULT=${result} EPIGEMM_PREFIX=${prefix}
                    EPIGEMM_UNIT=${unit})
    endforeach()
  endforeach()
endforeach()
