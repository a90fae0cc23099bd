# For every GPU since Ampere. A unit of ten tiles in 16 bits takes 36 s and has 215 KB of IR; those of three tiles, in TF32
# or on one fp16 slice, take 22 s of one core and have 80 KB; that of two tiles on two slices 17 s and 60 KB.
foreach(operand_tiles float16=10 bfloat16=10 tf32=3 split=2 scaled=3)
  string(REPLACE "=" ";" operand_tiles ${operand_tiles})
  list(GET operand_tiles 0 operand)
  list(GET operand_tiles 1 tiles)
  set(prefix epigemm_open_sm80_mma_${operand}_)
  epigemm_symbols(symbols ${tiles} ${prefix} "")
  epigemm_open_kernel(
    epigemm_open_sm80_mma_${operand} gemm/sm80_mma/open_unit.cu.in ARCH lto_80 CUTLASS SYMBOLS ${symbols}
    DEFINITIONS EPIGEMM_OPERAND=${operand} EPIGEMM_PREFIX=${prefix} EPIGEMM_TILES=${tiles})
endforeach()
epigemm_open_kernel(epigemm_open_sm80_fixup gemm/fp16_slices/open_fixup_unit.cu.in ARCH lto_80
                    DEFINITIONS EPIGEMM_RUN=run_fixup EPIGEMM_ARGUMENTS=FixupArguments)
