# fp32 on fp16 slices, the same with the weight as it lies, its fixup, and fp32 in multiply-adds.
foreach(tiles split:4 scaled:3)
  string(REGEX MATCH "^([a-z]+):([0-9]+)$" _ "${tiles}")
  set(arithmetic ${CMAKE_MATCH_1})
  epigemm_symbols(symbols ${CMAKE_MATCH_2} epigemm_open_sm90_fp16x3_${arithmetic}_ "")
  epigemm_open_kernel(epigemm_open_sm90_fp16x3_${arithmetic} gemm/sm90_fp16x3/open_${arithmetic}.cu.in ARCH lto_90a
                      CUTLASS SYMBOLS ${symbols})
endforeach()
foreach(tiles Split:4 Scaled:4)
  string(REGEX MATCH "^([A-Za-z]+):([0-9]+)$" _ "${tiles}")
  string(TOLOWER ${CMAKE_MATCH_1} arithmetic)
  set(definitions EPIGEMM_ARITHMETIC=${CMAKE_MATCH_1} EPIGEMM_TILES=${CMAKE_MATCH_2})
  foreach(is_transposed false true)
    set(unit epigemm_open_as_it_lies_${arithmetic})
    if(is_transposed STREQUAL true)
      set(unit epigemm_open_as_it_lies_transposed_${arithmetic})
    endif()
    epigemm_symbols(symbols ${CMAKE_MATCH_2} ${unit}_ "")
    epigemm_open_kernel(${unit} gemm/sm90_fp16x3/open_as_it_lies.cu.in ARCH lto_90a CUTLASS SYMBOLS ${symbols}
                        DEFINITIONS ${definitions} EPIGEMM_IS_TRANSPOSED=${is_transposed})
    # The same of rows in groups.
    string(REPLACE as_it_lies as_it_lies_grouped unit ${unit})
    epigemm_symbols(symbols 3 ${unit}_ "")
    epigemm_open_kernel(${unit} gemm/sm90_fp16x3/open_as_it_lies_grouped.cu.in ARCH lto_90a CUTLASS SYMBOLS ${symbols}
                        DEFINITIONS ${definitions} EPIGEMM_IS_TRANSPOSED=${is_transposed})
  endforeach()
endforeach()
epigemm_open_kernel(epigemm_open_fixup gemm/fp16_slices/open_fixup_unit.cu.in ARCH lto_90a
                    DEFINITIONS EPIGEMM_RUN=run_fixup EPIGEMM_ARGUMENTS=FixupArguments)
epigemm_open_kernel(epigemm_open_fixup_grouped gemm/fp16_slices/open_fixup_unit.cu.in ARCH lto_90a
                    DEFINITIONS EPIGEMM_RUN=run_grouped_fixup EPIGEMM_ARGUMENTS=GroupedFixupArguments)
epigemm_open_kernel(epigemm_open_fp32 gemm/fp16_slices/open_fixup_unit.cu.in ARCH lto_90a
                    DEFINITIONS EPIGEMM_RUN=run_fp32 EPIGEMM_ARGUMENTS=FixupArguments)
