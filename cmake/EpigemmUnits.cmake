# One object library per kind of source, each with its own include paths and flags (nothing is set globally): torch's
# headers reach csrc/torch alone, CUTLASS's headers the sources of csrc/gemm alone.
#
# Sets EPIGEMM_OBJECTS, the list of object libraries that make up the module.
set(csrc "${PROJECT_SOURCE_DIR}/csrc")
set(EPIGEMM_OBJECTS "")

# epigemm_objects(name SOURCES ...): compiled position-independent and hidden, with csrc/ and the generated headers.
function(epigemm_objects name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES")
  add_library(${name} OBJECT ${arg_SOURCES})
  target_include_directories(${name} PRIVATE "${csrc}" "${EPIGEMM_GENERATED_DIR}")
  # Every source's compiler options, so that the linker can drop what is not used.
  target_compile_options(
    ${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -ffunction-sections -fdata-sections>
                    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffunction-sections,-fdata-sections>)
  set_target_properties(
    ${name} PROPERTIES CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF CUDA_STANDARD 17
                       CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON
                       CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
                       CUDA_ARCHITECTURES OFF)
  set(EPIGEMM_OBJECTS ${EPIGEMM_OBJECTS} ${name} PARENT_SCOPE)
endfunction()

# --- the registry, the planner and the call: plain C++ ----------------------------------------------------------------------
file(GLOB core_sources CONFIGURE_DEPENDS "${csrc}/epilogue/*.cpp" "${csrc}/elementwise/*.cpp" "${csrc}/call/*.cpp"
     "${csrc}/gemm/planner/*.cpp" "${csrc}/gemm/*/coverage.cpp" "${csrc}/gemm/*/cublas.cpp" "${csrc}/gemm/*/family.cpp"
     "${csrc}/gemm/*/kernel_names.cpp" "${csrc}/link/kernels.cpp" "${csrc}/open/*.cpp")
# What needs a GPU has a stand-in that says so.
if(EPIGEMM_GEMM_ARCHITECTURES)
  file(GLOB launch_sources CONFIGURE_DEPENDS "${csrc}/gemm/launch.cpp" "${csrc}/gemm/*/kernels.cpp")
else()
  set(launch_sources "${csrc}/gemm/launch_none.cpp")
endif()
if(NOT EPIGEMM_WITH_CUDA)
  list(APPEND launch_sources "${csrc}/link/load_none.cpp")
endif()
epigemm_objects(epigemm_core SOURCES ${core_sources} ${launch_sources})

# --- the binding: torch's stable ABI ------------------------------------------------------------------------------
set(EPIGEMM_COMPILER "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" EPIGEMM_TORCH_HEADERS "${EPIGEMM_TORCH_VERSION}")
if(NOT EPIGEMM_WITH_CUDA)
  set(EPIGEMM_NVCC_VERSION "")
  set(EPIGEMM_CUTLASS_VERSION "")
endif()
configure_file("${PROJECT_SOURCE_DIR}/cmake/build_config.h.in" "${EPIGEMM_GENERATED_DIR}/build_config.h" @ONLY)

file(GLOB torch_sources CONFIGURE_DEPENDS "${csrc}/torch/*.cpp")
epigemm_objects(epigemm_torch SOURCES ${torch_sources})
target_include_directories(epigemm_torch SYSTEM PRIVATE "${EPIGEMM_TORCH_PATH}/include"
                                                        "${EPIGEMM_TORCH_PATH}/include/torch/csrc/api/include")
# Nothing newer than the ABI of torch 2.10, whatever torch the headers are from.
target_compile_definitions(epigemm_torch PRIVATE TORCH_TARGET_VERSION=0x020a000000000000)

# What was built, for every plain C++ source that asks: strings, so a header rather than quoted definitions.
foreach(target epigemm_core epigemm_torch)
  target_compile_options(${target} PRIVATE "SHELL:-include \"${EPIGEMM_GENERATED_DIR}/build_config.h\"")
endforeach()

# --- CUDA ---------------------------------------------------------------------------------------------------------
if(NOT EPIGEMM_WITH_CUDA)
  return()
endif()

set(cuda_flags -O3 --expt-relaxed-constexpr)
file(GLOB elementwise_sources CONFIGURE_DEPENDS "${csrc}/device/*.cu" "${csrc}/elementwise/*.cu"
     "${csrc}/reduce/*.cu" "${csrc}/gemm/fp16_slices/split_rows.cu"
     "${csrc}/gemm/fp16_slices/weight_roots.cu" "${csrc}/link/*.cu")
epigemm_objects(epigemm_elementwise SOURCES ${EPIGEMM_ELEMENTWISE_SOURCES} ${elementwise_sources})
target_compile_options(epigemm_elementwise PRIVATE ${cuda_flags} ${EPIGEMM_ELEMENTWISE_FLAGS})

include(EpigemmJobs)
if(EPIGEMM_GEMM_ARCHITECTURES)
  file(GLOB open_sources CONFIGURE_DEPENDS "${csrc}/gemm/*/open.cu")
  epigemm_objects(epigemm_sm90 SOURCES ${open_sources} "${csrc}/gemm/sm90/driver.cu")
  target_compile_options(epigemm_sm90 PRIVATE ${cuda_flags} ${EPIGEMM_GEMM_FLAGS})
  # CUTLASS leaves the waits for a programmatic dependent launch out of its kernels unless asked.
  # The driver's function for descriptors is called by its name: driver.cu.
  target_compile_definitions(epigemm_sm90 PRIVATE NDEBUG CUTLASS_ENABLE_GDC_FOR_SM90
                                                  CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL)
  target_include_directories(epigemm_sm90 SYSTEM PRIVATE "${EPIGEMM_CUTLASS_PATH}/include"
                                                         "${EPIGEMM_CUTLASS_PATH}/tools/util/include")
  set_target_properties(epigemm_sm90 PROPERTIES JOB_POOL_COMPILE epigemm_gemm)
  # Behind the GEMMs on slices; plain CUDA for the same architectures.
  epigemm_objects(epigemm_fixup SOURCES "${csrc}/gemm/fp16_slices/open_fixup.cu")
  target_compile_options(epigemm_fixup PRIVATE ${cuda_flags} ${EPIGEMM_GEMM_FLAGS})
endif()
include(EpigemmOpen)
include(EpigemmPrelink)
