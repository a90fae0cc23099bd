# Reads csrc/epilogue/registry.def, and generates, in the build folder, what exists once per epilogue. Reads
# csrc/gemm/families.def.
#
# Sets EPIGEMM_GENERATED_DIR, EPIGEMM_PRELINKED (names of epilogues), EPIGEMM_ELEMENTWISE_SOURCES and EPIGEMM_FAMILIES.
set(EPIGEMM_GENERATED_DIR "${PROJECT_BINARY_DIR}/generated")
set(EPIGEMM_GEMM_ELEMENTS float16 bfloat16 tf32)
set(registry "${PROJECT_SOURCE_DIR}/csrc/epilogue/registry.def")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${registry}")

file(STRINGS "${registry}" lines REGEX "^EPIGEMM_EPILOGUE")
set(EPIGEMM_EPILOGUE_INCLUDES "")
set(EPIGEMM_PRELINKED "")
set(EPIGEMM_ELEMENTWISE_SOURCES "")

# Sets EPIGEMM_NAME and EPIGEMM_FUNCTOR in the generated unit.
function(epigemm_unit list template unit)
  configure_file("${PROJECT_SOURCE_DIR}/csrc/${template}" "${EPIGEMM_GENERATED_DIR}/${unit}" @ONLY)
  set(${list} ${${list}} "${EPIGEMM_GENERATED_DIR}/${unit}" PARENT_SCOPE)
endfunction()

foreach(line IN LISTS lines)
  if(NOT line MATCHES "^EPIGEMM_EPILOGUE\\(([a-z0-9_]+), ([A-Za-z0-9_]+), (PRELINKED|LINKED|ELEMENTWISE_ONLY)\\)$")
    message(FATAL_ERROR "registry.def: '${line}' is not "
                        "EPIGEMM_EPILOGUE(name, Functor, PRELINKED | LINKED | ELEMENTWISE_ONLY)")
  endif()
  set(EPIGEMM_NAME "${CMAKE_MATCH_1}")
  set(EPIGEMM_FUNCTOR "${CMAKE_MATCH_2}")
  set(forms "${CMAKE_MATCH_3}")
  string(APPEND EPIGEMM_EPILOGUE_INCLUDES "#include \"epilogue/${EPIGEMM_NAME}.h\"\n")
  if(EPIGEMM_WITH_CUDA)
    epigemm_unit(EPIGEMM_ELEMENTWISE_SOURCES elementwise/unit.cu.in elementwise/${EPIGEMM_NAME}.cu)
  endif()
  if(forms STREQUAL "PRELINKED")
    list(APPEND EPIGEMM_PRELINKED "${EPIGEMM_NAME}")
  endif()
endforeach()

configure_file("${PROJECT_SOURCE_DIR}/csrc/epilogue/headers.h.in" "${EPIGEMM_GENERATED_DIR}/epilogue/headers.h" @ONLY)

set(families "${PROJECT_SOURCE_DIR}/csrc/gemm/families.def")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${families}")
file(STRINGS "${families}" lines REGEX "^EPIGEMM_FAMILY")
string(REGEX REPLACE "EPIGEMM_FAMILY\\(([a-z0-9_]+)\\)" "\\1" EPIGEMM_FAMILIES "${lines}")
