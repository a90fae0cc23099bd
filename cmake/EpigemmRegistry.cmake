# Reads csrc/epilogue/registry.def and generates, in the build folder, what exists once per epilogue.
#
# Sets EPIGEMM_GENERATED_DIR, EPIGEMM_SM90_SOURCES, EPIGEMM_REPAIR_SOURCES and EPIGEMM_ELEMENTWISE_SOURCES.
set(EPIGEMM_GENERATED_DIR "${PROJECT_BINARY_DIR}/generated")
set(EPIGEMM_GEMM_ELEMENTS float16 bfloat16 tf32)
set(registry "${PROJECT_SOURCE_DIR}/csrc/epilogue/registry.def")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${registry}")

file(STRINGS "${registry}" lines REGEX "^EPIGEMM_EPILOGUE")
set(EPIGEMM_EPILOGUE_INCLUDES "")
set(EPIGEMM_SM90_SOURCES "")
set(EPIGEMM_REPAIR_SOURCES "")
set(EPIGEMM_ELEMENTWISE_SOURCES "")

# Sets EPIGEMM_NAME, EPIGEMM_FUNCTOR (and EPIGEMM_ELEMENT for a GEMM) in the generated unit.
function(epigemm_unit list template unit)
  configure_file("${PROJECT_SOURCE_DIR}/csrc/${template}" "${EPIGEMM_GENERATED_DIR}/${unit}" @ONLY)
  set(${list} ${${list}} "${EPIGEMM_GENERATED_DIR}/${unit}" PARENT_SCOPE)
endfunction()

foreach(line IN LISTS lines)
  if(NOT line MATCHES "^EPIGEMM_EPILOGUE\\(([a-z0-9_]+), ([A-Za-z0-9_]+), (LINEAR_AND_ELEMENTWISE|ELEMENTWISE_ONLY)\\)$")
    message(FATAL_ERROR "registry.def: '${line}' is not "
                        "EPIGEMM_EPILOGUE(name, Functor, LINEAR_AND_ELEMENTWISE | ELEMENTWISE_ONLY)")
  endif()
  set(EPIGEMM_NAME "${CMAKE_MATCH_1}")
  set(EPIGEMM_FUNCTOR "${CMAKE_MATCH_2}")
  set(forms "${CMAKE_MATCH_3}")
  string(APPEND EPIGEMM_EPILOGUE_INCLUDES "#include \"epilogue/${EPIGEMM_NAME}.h\"\n")
  if(EPIGEMM_WITH_CUDA)
    epigemm_unit(EPIGEMM_ELEMENTWISE_SOURCES elementwise/unit.cu.in elementwise/${EPIGEMM_NAME}.cu)
  endif()
  if(EPIGEMM_GEMM_ARCHITECTURES AND forms STREQUAL "LINEAR_AND_ELEMENTWISE")
    foreach(EPIGEMM_ELEMENT IN LISTS EPIGEMM_GEMM_ELEMENTS)
      epigemm_unit(EPIGEMM_SM90_SOURCES gemm/sm90/unit.cu.in sm90/${EPIGEMM_NAME}_${EPIGEMM_ELEMENT}.cu)
      epigemm_unit(EPIGEMM_SM90_SOURCES gemm/narrow/unit.cu.in narrow/${EPIGEMM_NAME}_${EPIGEMM_ELEMENT}.cu)
    endforeach()
    epigemm_unit(EPIGEMM_SM90_SOURCES gemm/split/unit.cu.in split/${EPIGEMM_NAME}.cu)
    epigemm_unit(EPIGEMM_REPAIR_SOURCES gemm/split/repair_unit.cu.in split/${EPIGEMM_NAME}_repair.cu)
  endif()
endforeach()

configure_file("${PROJECT_SOURCE_DIR}/csrc/epilogue/headers.h.in" "${EPIGEMM_GENERATED_DIR}/epilogue/headers.h" @ONLY)
