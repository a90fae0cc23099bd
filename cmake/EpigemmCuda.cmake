# Turns on the CUDA language with the nvcc that was found, and finds the static runtime beside it.
#
# Sets EPIGEMM_TOOLKIT, EPIGEMM_CUDART and EPIGEMM_CUDA_INCLUDE_DIR.

# A wrapper script may stand in for nvcc: ask the toolkit itself where it lies.
execute_process(COMMAND "${EPIGEMM_NVCC_PATH}" --dryrun -c epigemm.cu ERROR_VARIABLE dryrun OUTPUT_QUIET)
if(NOT dryrun MATCHES "#\\$ TOP=([^\r\n]+)")
  message(FATAL_ERROR "${EPIGEMM_NVCC_PATH} --dryrun does not tell where its toolkit lies:\n${dryrun}")
endif()
get_filename_component(toolkit "${CMAKE_MATCH_1}" REALPATH)
set(EPIGEMM_TOOLKIT "${toolkit}")

find_library(EPIGEMM_CUDART cudart_static HINTS "${toolkit}" NO_DEFAULT_PATH
             PATH_SUFFIXES lib64 lib "targets/${CMAKE_HOST_SYSTEM_PROCESSOR}-linux/lib" targets/sbsa-linux/lib)
find_path(EPIGEMM_CUDA_INCLUDE_DIR cuda_runtime_api.h HINTS "${toolkit}" NO_DEFAULT_PATH
          PATH_SUFFIXES include "targets/${CMAKE_HOST_SYSTEM_PROCESSOR}-linux/include" targets/sbsa-linux/include)
if(NOT EPIGEMM_CUDART OR NOT EPIGEMM_CUDA_INCLUDE_DIR)
  message(FATAL_ERROR "nvcc is in ${toolkit}, but the CUDA runtime (cuda_runtime_api.h, libcudart_static.a) is not.\n"
                      "  pip install 'nvidia-cuda-runtime==13.0.*', or the toolkit's cuda-cudart-dev package")
endif()

# Architectures are ours to choose, per target.
set(CMAKE_CUDA_ARCHITECTURES OFF)
set(CMAKE_CUDA_COMPILER "${EPIGEMM_NVCC_PATH}" CACHE FILEPATH "nvcc")
# PyPI's packages keep the runtime in `lib`, where their nvcc does not look: CMake's check of the compiler links.
get_filename_component(cudart_dir "${EPIGEMM_CUDART}" DIRECTORY)
set(library_path "$ENV{LIBRARY_PATH}")
set(ENV{LIBRARY_PATH} "${cudart_dir}:${library_path}")
enable_language(CUDA)
set(ENV{LIBRARY_PATH} "${library_path}")
