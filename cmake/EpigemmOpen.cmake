# The open kernels: compiled to LTO-IR, into which an epilogue is linked at run time (csrc/open/contract.h). They are no part
# of the module: epigemm/ir/ in the wheel holds one compressed file per unit, and index.json, which says for every kernel
# (its symbol) in which file it is.
#
# Several kernels a unit: most of the time goes into CUTLASS's headers (six tiles in one unit 49 s, one by one 120 s), and
# the linker, told which kernel is wanted, takes 0.05 s longer over six.
set(EPIGEMM_IR_DIR "${PROJECT_BINARY_DIR}/ir")
set(EPIGEMM_IR_FILES "")
set(EPIGEMM_IR_INDEX "")

# fatbinary, which compresses IR to a quarter, lies beside nvcc in the toolkit.
find_program(EPIGEMM_FATBINARY fatbinary HINTS "${EPIGEMM_TOOLKIT}/bin" NO_DEFAULT_PATH REQUIRED)

# epigemm_open_kernel(unit template ARCH lto_90a|lto_80 [CUTLASS] [SYMBOLS symbol ...] [DEFINITIONS NAME=VALUE ...])
#
# For every open kernel, whatever its family. `unit` names the file of IR, and the kernel in it unless SYMBOLS lists the
# kernels. `template` is a path below csrc/. A definition is both a variable for @NAME@ in the template and a macro;
# EPIGEMM_SYMBOL is always among them and is `unit`. CUTLASS: with its headers and flags.
function(epigemm_open_kernel unit template)
  cmake_parse_arguments(PARSE_ARGV 2 arg "CUTLASS" "ARCH" "SYMBOLS;DEFINITIONS")
  set(flags -DEPIGEMM_SYMBOL=${unit})
  set(EPIGEMM_SYMBOL ${unit})
  foreach(definition IN LISTS arg_DEFINITIONS)
    string(REGEX MATCH "^([^=]+)=(.*)$" _ "${definition}")
    set(${CMAKE_MATCH_1} "${CMAKE_MATCH_2}")
    list(APPEND flags "-D${definition}")
  endforeach()
  if(arg_CUTLASS)
    list(APPEND flags ${EPIGEMM_CUTLASS_FLAGS})
  endif()
  if(NOT arg_SYMBOLS)
    set(arg_SYMBOLS ${unit})
  endif()

  set(source "${EPIGEMM_GENERATED_DIR}/open/${unit}.cu")
  set(ir "${EPIGEMM_IR_DIR}/${unit}.ltoir")
  set(file "${EPIGEMM_IR_DIR}/${unit}.fatbin")
  configure_file("${csrc}/${template}" "${source}" @ONLY)
  string(REPLACE "lto_" "" number ${arg_ARCH})
  # Optimised before the link (-gen-opt-lto): otherwise the IR is forty times as large and the link takes 6 s.
  add_custom_command(
    OUTPUT "${file}"
    COMMAND "${CMAKE_CUDA_COMPILER}" -std=c++17 -O3 --expt-relaxed-constexpr -arch=${arg_ARCH} -dlto -dc -ltoir -gen-opt-lto
            "-I${csrc}" "-I${EPIGEMM_GENERATED_DIR}" ${flags} -MD -MF "${file}.d" -MT "${file}" "${source}" -o "${ir}"
    COMMAND "${EPIGEMM_FATBINARY}" -64 --compress-all --compress-mode=size "--image3=kind=nvvm,sm=${number},file=${ir}"
            "--create=${file}"
    COMMAND "${CMAKE_COMMAND}" -E rm "${ir}"
    DEPENDS "${source}"
    DEPFILE "${file}.d"
    JOB_POOL epigemm_gemm
    COMMENT "Open kernels ${unit}"
    VERBATIM)

  foreach(symbol IN LISTS arg_SYMBOLS)
    list(APPEND EPIGEMM_IR_INDEX "  \"${symbol}\": \"${unit}.fatbin\"")
  endforeach()
  set(EPIGEMM_IR_INDEX "${EPIGEMM_IR_INDEX}" PARENT_SCOPE)
  set(EPIGEMM_IR_FILES ${EPIGEMM_IR_FILES} "${file}" PARENT_SCOPE)
endfunction()

# `${prefix}0${suffix}` and so on: a kernel for each of a family's tiles.
function(epigemm_symbols list count prefix suffix)
  set(symbols "")
  math(EXPR last "${count} - 1")
  foreach(tile RANGE ${last})
    list(APPEND symbols "${prefix}${tile}${suffix}")
  endforeach()
  set(${list} ${symbols} PARENT_SCOPE)
endfunction()

file(MAKE_DIRECTORY "${EPIGEMM_IR_DIR}")

# --- the epilogue alone, and its derivatives: for every GPU since Ampere ------------------------------------------------
# EPIGEMM_BLOCKS=0 leaves the registers to the compiler, which weighs them against the blocks of a multiprocessor. With 1
# it takes up to half as many again.
foreach(element float16 bfloat16 float32 float64)
  epigemm_open_kernel(
    epigemm_open_elementwise_${element} elementwise/open_unit.cu.in ARCH lto_80
    DEFINITIONS EPIGEMM_ELEMENT=${element} EPIGEMM_ARGUMENTS=ElementwiseArguments EPIGEMM_RUN=run_elementwise
                EPIGEMM_BLOCKS=0)
  epigemm_open_kernel(
    epigemm_open_derivative_${element} elementwise/open_unit.cu.in ARCH lto_80
    DEFINITIONS EPIGEMM_ELEMENT=${element} EPIGEMM_ARGUMENTS=DerivativeArguments EPIGEMM_RUN=run_derivative
                EPIGEMM_BLOCKS=0)
  # Two blocks: a functor that reads several matrices needs more registers than three would leave it.
  epigemm_open_kernel(
    epigemm_open_derivative_sums_${element} elementwise/open_unit.cu.in ARCH lto_80
    DEFINITIONS EPIGEMM_ELEMENT=${element} EPIGEMM_ARGUMENTS=DerivativeArguments EPIGEMM_RUN=run_derivative_sums
                EPIGEMM_BLOCKS=2)
endforeach()

# --- the GEMM families: each lists its kernels in csrc/gemm/FAMILY/open.cmake ----------------------------------------------
set(EPIGEMM_CUTLASS_FLAGS -DNDEBUG -DCUTLASS_ENABLE_GDC_FOR_SM90 -DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL -isystem
                          "${EPIGEMM_CUTLASS_PATH}/include" -isystem "${EPIGEMM_CUTLASS_PATH}/tools/util/include")
if(EPIGEMM_GEMM_ARCHITECTURES)
  foreach(family IN LISTS EPIGEMM_FAMILIES)
    include("${csrc}/gemm/${family}/open.cmake")
  endforeach()
endif()

# --- all of them, behind the last one -----------------------------------------------------------------------------------
list(JOIN EPIGEMM_IR_INDEX ",\n" index)
file(CONFIGURE OUTPUT "${EPIGEMM_IR_DIR}/index.json" CONTENT "{\n${index}\n}\n" @ONLY)
add_custom_target(epigemm_ir ALL DEPENDS ${EPIGEMM_IR_FILES})
install(FILES ${EPIGEMM_IR_FILES} "${EPIGEMM_IR_DIR}/index.json" DESTINATION epigemm/ir)
