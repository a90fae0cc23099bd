# The large tiles, in units of four or five: a compiler takes 40 seconds and 3 GB for each. The last two units are for
# 16 bits alone.
foreach(element IN LISTS EPIGEMM_GEMM_ELEMENTS)
  set(prefix epigemm_open_sm90_tma_${element}_)
  epigemm_symbols(symbols 19 ${prefix} "")
  set(unit 0)
  foreach(tiles "0;4" "4;4" "8;3" "11;5" "16;3")  # the first, how many
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
    # Rows in groups.
    foreach(order "_grouped;false" "_grouped_transposed;true")
      list(GET order 0 suffix)
      list(GET order 1 is_transposed)
      epigemm_symbols(symbols 3 ${prefix} ${suffix})
      epigemm_symbols(pairs 2 ${prefix} ${suffix}_pair)
      epigemm_open_kernel(
        epigemm_open_sm90_tma_${element}${suffix} gemm/sm90_tma/open_grouped_unit.cu.in ARCH lto_90a CUTLASS
        SYMBOLS ${symbols} ${pairs} DEFINITIONS EPIGEMM_ELEMENT=${element} EPIGEMM_PREFIX=${prefix}
                                                EPIGEMM_SUFFIX=${suffix} EPIGEMM_TRANSPOSED=${is_transposed})
    endforeach()
  endif()
endforeach()

# 8 bits, fast and promoted sums beside each other: e5m2 beside e4m3 has the first unit, to bf16; e4m3 has two for each
# type of results and one of pairs, and four more to bf16. Blocks have tiles of their own.
set(units_of_8_bits "fast_0;promoted_0" "fast_1;fast_2;promoted_1;promoted_2" "fast_3;fast_4;fast_5;promoted_3"
                    "fast_6;fast_7;promoted_4" "fast_1;promoted_1;fast_0_pair" "fast_0_pair;promoted_0_pair"
                    "fast_1_pair" "fast_3" "fast_2;fast_1_pair" "fast_8;fast_9;promoted_5;promoted_6"
                    "blocks_0;blocks_1" "blocks_2;blocks_0_pair" "blocks_3;blocks_4" "fast_10;promoted_7;promoted_8")
set(firsts_of_8_bits 0 2 6 10 13 16 18 19 20 22 26 28 30 32)
set(counts_of_8_bits 2 4 4 3 3 2 1 1 2 4 2 2 2 3)
foreach(types "e4m3;e4m3;bfloat16;0;1;2;3;5;6;9;10;11;12;13" "e4m3;e4m3;float16;0;1;5;10;11"
              "e4m3;e4m3;float32;0;1;5;10;11" "e4m3;e4m3;bfloat16_to_e4m3;0;1;5;6;7;10;11"
              "e4m3;e4m3;bfloat16_to_blocks;0;4;8;10" "e5m2;e4m3;bfloat16;0"
              "e4m3;e5m2;bfloat16;0")
  list(GET types 0 x)
  list(GET types 1 weight)
  list(GET types 2 result)
  list(SUBLIST types 3 -1 units)
  set(prefix epigemm_open_sm90_tma_${x}_${weight}_${result}_)
  foreach(unit IN LISTS units)
    list(GET firsts_of_8_bits ${unit} first)
    list(GET counts_of_8_bits ${unit} count)
    list(SUBLIST units_of_8_bits ${first} ${count} symbols)
    list(TRANSFORM symbols PREPEND ${prefix})
    epigemm_open_kernel(
      ${prefix}unit${unit} gemm/sm90_tma/open_eight_bits_unit.cu.in ARCH lto_90a CUTLASS SYMBOLS ${symbols}
      DEFINITIONS EPIGEMM_X=${x} EPIGEMM_WEIGHT=${weight} EPIGEMM_RESULT=${result} EPIGEMM_PREFIX=${prefix}
                  EPIGEMM_UNIT=${unit})
  endforeach()
endforeach()
