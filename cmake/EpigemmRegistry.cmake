# Reads csrc/epilogue/registry.def and csrc/gemm/families.def, and generates, in the build folder, what exists once per
# epilogue and family.
#
# Sets EPIGEMM_GENERATED_DIR, EPIGEMM_SM90_SOURCES, EPIGEMM_REPAIR_SOURCES and EPIGEMM_ELEMENTWISE_SOURCES.
set(EPIGEMM_GENERATED_DIR "${PROJECT_BINARY_DIR}/generated")
set(EPIGEMM_GEMM_ELEMENTS float16 bfloat16 tf32)
set(registry "${PROJECT_SOURCE_DIR}/csrc/epilogue/registry.def")
set(families "${PROJECT_SOURCE_DIR}/csrc/gemm/families.def")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${registry}" "${families}")

file(STRINGS "${families}" EPIGEMM_FAMILIES REGEX "^EPIGEMM_FAMILY")
list(TRANSFORM EPIGEMM_FAMILIES REPLACE "^EPIGEMM_FAMILY\\(([a-z0-9_]+)\\)$" "\\1")

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
    foreach(family IN LISTS EPIGEMM_FAMILIES)
      # A template that names an element type is compiled for each of them.
      file(STRINGS "${PROJECT_SOURCE_DIR}/csrc/gemm/${family}/unit.cu.in" per_element REGEX "@EPIGEMM_ELEMENT@")
      if(per_element)
        foreach(EPIGEMM_ELEMENT IN LISTS EPIGEMM_GEMM_ELEMENTS)
          epigemm_unit(EPIGEMM_SM90_SOURCES gemm/${family}/unit.cu.in ${family}/${EPIGEMM_NAME}_${EPIGEMM_ELEMENT}.cu)
        endforeach()
      else()
        epigemm_unit(EPIGEMM_SM90_SOURCES gemm/${family}/unit.cu.in ${family}/${EPIGEMM_NAME}.cu)
      endif()
    endforeach()
    epigemm_unit(EPIGEMM_REPAIR_SOURCES gemm/sm90_fp16x3/repair_unit.cu.in sm90_fp16x3/${EPIGEMM_NAME}_repair.cu)
  endif()
endforeach()

configure_file("${PROJECT_SOURCE_DIR}/csrc/epilogue/headers.h.in" "${EPIGEMM_GENERATED_DIR}/epilogue/headers.h" @ONLY)
