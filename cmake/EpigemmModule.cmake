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
