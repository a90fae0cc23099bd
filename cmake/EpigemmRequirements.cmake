# Finds torch, CUTLASS, nvcc and nvJitLink by build_backend/locate.py, decides whether CUDA is built, and stops with one error that
# names everything missing. Torch's own CMake package is not used: it rewrites the CUDA architectures.
#
# Sets EPIGEMM_WITH_CUDA (0 or 1) and EPIGEMM_{TORCH,CUTLASS,NVCC,NVJITLINK}_{PATH,VERSION,PROBLEM,INSTALL}.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

string(TOUPPER "${EPIGEMM_CUDA}" EPIGEMM_CUDA)
if(EPIGEMM_CUDA MATCHES "^(1|TRUE|YES|Y)$")
  set(EPIGEMM_CUDA ON)
elseif(EPIGEMM_CUDA MATCHES "^(0|FALSE|NO|N)$")
  set(EPIGEMM_CUDA OFF)
elseif(NOT EPIGEMM_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "EPIGEMM_CUDA is '${EPIGEMM_CUDA}'; accepted are AUTO, ON and OFF")
endif()

function(epigemm_locate)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/build_backend/locate.py" --torch-dir "${EPIGEMM_TORCH_DIR}"
            --cutlass-dir "${EPIGEMM_CUTLASS_DIR}" --nvcc "${CMAKE_CUDA_COMPILER}"
    OUTPUT_VARIABLE found COMMAND_ERROR_IS_FATAL ANY)
  foreach(requirement torch cutlass nvcc nvjitlink)
    string(TOUPPER "EPIGEMM_${requirement}" prefix)
    foreach(key path version problem install)
      string(JSON value GET "${found}" ${requirement} ${key})
      string(TOUPPER "${key}" key)
      set(${prefix}_${key} "${value}" PARENT_SCOPE)
    endforeach()
  endforeach()
endfunction()

# Appends the problem of each named requirement that has one.
function(epigemm_problems result)
  set(text "")
  foreach(requirement ${ARGN})
    if(EPIGEMM_${requirement}_PROBLEM)
      string(APPEND text "\n  ${EPIGEMM_${requirement}_PROBLEM}\n    ${EPIGEMM_${requirement}_INSTALL}")
    endif()
  endforeach()
  set(${result} "${text}" PARENT_SCOPE)
endfunction()

epigemm_locate()

set(needed TORCH)
if(EPIGEMM_CUDA STREQUAL "ON")
  list(APPEND needed CUTLASS NVCC NVJITLINK)
endif()
epigemm_problems(problems ${needed})
if(problems)
  message(FATAL_ERROR "epigemm cannot be built with EPIGEMM_CUDA=${EPIGEMM_CUDA}. Missing, each with the command that "
                      "installs it:${problems}\n")
endif()

epigemm_problems(problems CUTLASS NVCC NVJITLINK)
if(EPIGEMM_CUDA STREQUAL "OFF" OR problems)
  set(EPIGEMM_WITH_CUDA 0)
else()
  set(EPIGEMM_WITH_CUDA 1)
endif()

message(STATUS "epigemm: torch ${EPIGEMM_TORCH_VERSION} in ${EPIGEMM_TORCH_PATH}")
if(EPIGEMM_WITH_CUDA)
  message(STATUS "epigemm: nvcc ${EPIGEMM_NVCC_VERSION} (${EPIGEMM_NVCC_PATH})")
  message(STATUS "epigemm: CUTLASS ${EPIGEMM_CUTLASS_VERSION} in ${EPIGEMM_CUTLASS_PATH}")
  include(EpigemmCuda)
elseif(problems AND EPIGEMM_CUDA STREQUAL "AUTO")
  message(STATUS "epigemm: building the CPU part alone. For the CUDA kernels, install what is missing:${problems}\n")
else()
  message(STATUS "epigemm: building the CPU part alone (EPIGEMM_CUDA=OFF)")
endif()
