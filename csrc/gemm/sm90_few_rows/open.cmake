epigemm_symbols(symbols 4 epigemm_open_sm90_few_rows_ "")
epigemm_open_kernel(epigemm_open_sm90_few_rows gemm/sm90_few_rows/open_unit.cu.in ARCH lto_90a SYMBOLS ${symbols})
