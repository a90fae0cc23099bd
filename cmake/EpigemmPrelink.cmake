# The built-in epilogues that registry.def calls PRELINKED, linked into every open kernel that they may need:
# epigemm/cubins/NAME.zip in the wheel holds the machine code of each kernel under its symbol. They are what
# epigemm/linking would make at first use: build_backend/prelink.py calls the same functions.
if(NOT EPIGEMM_GEMM_ARCHITECTURES)
  return()
endif()
set(EPIGEMM_CUBIN_DIR "${PROJECT_BINARY_DIR}/cubins")
file(MAKE_DIRECTORY "${EPIGEMM_CUBIN_DIR}")
set(cubins "")
foreach(name IN LISTS EPIGEMM_PRELINKED)
  set(functors "")
  foreach(unit "${name}" "${name}_16")
    set(source "${EPIGEMM_GENERATED_DIR}/functors/${unit}.cu")
    set(functor "${EPIGEMM_CUBIN_DIR}/${unit}.ltoir")
    # -arch=lto_90a: nvJitLink takes what was compiled for the GPU that it links for, or for an older one.
    add_custom_command(
      OUTPUT "${functor}"
      COMMAND "${CMAKE_CUDA_COMPILER}" -std=c++17 -O3 --expt-relaxed-constexpr -arch=lto_90a -dlto -dc -ltoir "-I${csrc}" -MD -MF
              "${functor}.d" -MT "${functor}" "${source}" -o "${functor}"
      DEPENDS "${source}"
      DEPFILE "${functor}.d"
      COMMENT "Functor ${unit}"
      VERBATIM)
    list(APPEND functors "${functor}")
  endforeach()
  set(file "${EPIGEMM_CUBIN_DIR}/${name}.zip")
  add_custom_command(
    OUTPUT "${file}"
    COMMAND "${CMAKE_COMMAND}" -E env "EPIGEMM_CUDA_LIBRARIES=${EPIGEMM_NVJITLINK_PATH}" "${Python_EXECUTABLE}"
            "${PROJECT_SOURCE_DIR}/build_backend/prelink.py" --header "${csrc}/epilogue/${name}.h" --ir "${EPIGEMM_IR_DIR}" --out
            "${file}" ${functors}
    DEPENDS ${functors} ${EPIGEMM_IR_FILES} "${EPIGEMM_IR_DIR}/index.json" "${PROJECT_SOURCE_DIR}/build_backend/prelink.py"
            "${PROJECT_SOURCE_DIR}/python/epigemm/linking/nvjitlink.py"
    COMMENT "Linking ${name}"
    VERBATIM)
  list(APPEND cubins "${file}")
endforeach()
add_custom_target(epigemm_cubins ALL DEPENDS ${cubins})
install(FILES ${cubins} DESTINATION epigemm/cubins)
