# Links the object libraries into `_C.so`.
add_library(epigemm_module MODULE)
target_link_libraries(epigemm_module PRIVATE ${EPIGEMM_OBJECTS} "${EPIGEMM_TORCH_PATH}/lib/libtorch_cpu.so")
set_target_properties(
  epigemm_module
  PROPERTIES OUTPUT_NAME _C
             PREFIX ""
             SUFFIX .so
             LINKER_LANGUAGE CXX
             CUDA_RUNTIME_LIBRARY None
             CUDA_RESOLVE_DEVICE_SYMBOLS OFF
             # torch has already loaded its libraries when the module is opened: no path of this machine is kept.
             SKIP_BUILD_RPATH ON
             INSTALL_RPATH ""
             LINK_DEPENDS "${PROJECT_SOURCE_DIR}/cmake/module.map")

# Exports nothing: its operators register themselves when it is loaded. Torch's libraries are looked up for undefined
# symbols, but what those need in turn (libc10 and so on) is theirs to find.
target_link_options(
  epigemm_module PRIVATE "-Wl,--version-script=${PROJECT_SOURCE_DIR}/cmake/module.map" -Wl,--gc-sections
  -Wl,--no-undefined -Wl,--as-needed -Wl,--allow-shlib-undefined -Wl,--exclude-libs,ALL)

if(EPIGEMM_WITH_CUDA)
  target_link_libraries(epigemm_module PRIVATE "${EPIGEMM_CUDART}" pthread dl rt)
endif()

install(TARGETS epigemm_module LIBRARY DESTINATION epigemm)

# What an epilogue is compiled with at run time, without CUTLASS or torch.
install(
  DIRECTORY "${csrc}/epilogue" "${csrc}/open"
  DESTINATION epigemm/include
  FILES_MATCHING
  PATTERN "*.h"
  PATTERN "costs.def")

# The entry: `_entry.abi3.so`, for every CPython from 3.10 on. Without Python's headers, or with a torch whose headers
# know no exchange API, it is left out: PyTorch's operators compute every call then.
execute_process(COMMAND "${Python_EXECUTABLE}" -c "import sysconfig; print(sysconfig.get_path('include'), end='')"
                OUTPUT_VARIABLE python_include COMMAND_ERROR_IS_FATAL ANY)
set(dlpack "${EPIGEMM_TORCH_PATH}/include/ATen/dlpack.h")
set(dlpack_text "")
if(EXISTS "${dlpack}")
  file(STRINGS "${dlpack}" dlpack_text REGEX "struct DLPackExchangeAPI ")
endif()
if(NOT EXISTS "${python_include}/Python.h" OR NOT dlpack_text)
  message(WARNING "epigemm is built without its entry, and PyTorch's operators compute every call: it takes "
                  "${python_include}/Python.h and a torch whose ATen/dlpack.h has the exchange API")
  return()
endif()
file(GLOB entry_sources CONFIGURE_DEPENDS "${csrc}/python/*.cpp")
add_library(epigemm_entry MODULE ${entry_sources} "${csrc}/call/tensor.cpp")
target_include_directories(epigemm_entry PRIVATE "${csrc}")
target_include_directories(epigemm_entry SYSTEM PRIVATE "${python_include}" "${EPIGEMM_TORCH_PATH}/include")
target_compile_definitions(epigemm_entry PRIVATE Py_LIMITED_API=0x030a0000)
target_compile_options(epigemm_entry PRIVATE -Wall -Wextra)
target_link_libraries(epigemm_entry PRIVATE ${CMAKE_DL_LIBS})
set_target_properties(
  epigemm_entry
  PROPERTIES OUTPUT_NAME _entry PREFIX "" SUFFIX .abi3.so CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF
             CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON SKIP_BUILD_RPATH ON INSTALL_RPATH "")
install(TARGETS epigemm_entry LIBRARY DESTINATION epigemm)
