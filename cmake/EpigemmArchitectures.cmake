# Turns EPIGEMM_ARCHITECTURES into nvcc's flags.
#
# Sets EPIGEMM_ELEMENTWISE_FLAGS, EPIGEMM_ELEMENTWISE_ARCHITECTURES ("80;90"), EPIGEMM_GEMM_FLAGS and
# EPIGEMM_GEMM_ARCHITECTURES ("90a", empty when no GEMM kernels are built); all empty without CUDA.
set(EPIGEMM_ELEMENTWISE_FLAGS "")
set(EPIGEMM_ELEMENTWISE_ARCHITECTURES "")
set(EPIGEMM_GEMM_FLAGS "")
set(EPIGEMM_GEMM_ARCHITECTURES "")

if(NOT EPIGEMM_WITH_CUDA)
  return()
endif()

foreach(entry IN LISTS EPIGEMM_ARCHITECTURES)
  if(NOT entry MATCHES "^([0-9]+)(a?)(\\+PTX)?$" OR CMAKE_MATCH_1 LESS 80 OR (CMAKE_MATCH_2 AND NOT CMAKE_MATCH_1 EQUAL 90))
    message(FATAL_ERROR "EPIGEMM_ARCHITECTURES: '${entry}' in '${EPIGEMM_ARCHITECTURES}' is not understood; accepted are "
                        "architectures of at least 80, each with or without '+PTX', and 90a (90 and the Hopper GEMM "
                        "kernels), for example \"80+PTX;90a\"")
  endif()
  set(number ${CMAKE_MATCH_1})
  set(specific "${CMAKE_MATCH_2}")
  set(ptx "${CMAKE_MATCH_3}")
  list(APPEND EPIGEMM_ELEMENTWISE_FLAGS "SHELL:-gencode arch=compute_${number},code=sm_${number}")
  if(ptx)
    list(APPEND EPIGEMM_ELEMENTWISE_FLAGS "SHELL:-gencode arch=compute_${number},code=compute_${number}")
  endif()
  list(APPEND EPIGEMM_ELEMENTWISE_ARCHITECTURES ${number})
  if(specific)
    # Hopper's wgmma and TMA exist for sm_90a alone: a plain sm_90 pass of the same source would trap at run time.
    list(APPEND EPIGEMM_GEMM_FLAGS "SHELL:-gencode arch=compute_90a,code=sm_90a")
    list(APPEND EPIGEMM_GEMM_ARCHITECTURES 90a)
  endif()
endforeach()

if(NOT EPIGEMM_ELEMENTWISE_ARCHITECTURES)
  message(FATAL_ERROR "EPIGEMM_ARCHITECTURES is empty; pass EPIGEMM_CUDA=OFF to build without CUDA kernels")
endif()
message(STATUS "epigemm: elementwise kernels for ${EPIGEMM_ELEMENTWISE_ARCHITECTURES}; "
               "GEMM kernels for ${EPIGEMM_GEMM_ARCHITECTURES}")
