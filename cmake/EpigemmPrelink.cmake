# The built-in epilogues that registry.def calls PRELINKED, linked into every open kernel that they may need:
# epigemm/cubins/NAME.zip in the wheel holds the machine code of each kernel under its symbol. They are what
# epigemm/linker would make at first use: build_backend/prelink.py calls the same functions.
if(NOT EPIGEMM_GEMM_ARCHITECTURES)
  return()
endif()
set(EPIGEMM_CUBIN_DIR "${PROJECT_BINARY_DIR}/cubins")
file(MAKE_DIRECTORY "${EPIGEMM_CUBIN_DIR}")
# Those that read matrices are not in the registry: epigemm/epilogues/formulas.py has them.
set(prelink "${PROJECT_SOURCE_DIR}/build_backend/prelink.py")
set(package "${PROJECT_SOURCE_DIR}/python/epigemm")
file(GLOB tracer CONFIGURE_DEPENDS "${package}/epilogues/tracer/*.py")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${prelink}" "${package}/epilogues/formulas.py" ${tracer}
                                       "${csrc}/epilogue/costs.def")
execute_process(COMMAND "${Python_EXECUTABLE}" "${prelink}" --write-sources "${EPIGEMM_GENERATED_DIR}/functors"
                OUTPUT_VARIABLE reading_matrices COMMAND_ERROR_IS_FATAL ANY)
# The last one is linked into the kernels of pairs of products, for tools/check_wheel.py alone: it is not installed.
list(POP_BACK reading_matrices of_pairs)
set(cubins "")
set(checked "")
foreach(name IN LISTS EPIGEMM_PRELINKED reading_matrices of_pairs)
  set(which "")
  set(list cubins)
  if(name IN_LIST reading_matrices)
    set(which --reads-matrices)
  elseif(name STREQUAL of_pairs)
    set(which --pairs)
    set(list checked)
  endif()
  set(functors "")
  foreach(unit "${name}" "${name}_float16" "${name}_bfloat16")
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
            "${prelink}" ${which} --ir "${EPIGEMM_IR_DIR}" --out "${file}" ${functors}
    DEPENDS ${functors} ${EPIGEMM_IR_FILES} "${EPIGEMM_IR_DIR}/index.json" "${prelink}" "${package}/linker/libraries.py"
    COMMENT "Linking ${name}"
    VERBATIM)
  list(APPEND ${list} "${file}")
endforeach()
add_custom_target(epigemm_cubins ALL DEPENDS ${cubins} ${checked})
install(FILES ${cubins} DESTINATION epigemm/cubins)
