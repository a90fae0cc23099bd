// The built-in epilogues by name. Include this only where one of them is named, so that what open kernels (csrc/open)
// include does not depend on the list.
#pragma once

#include "epilogue/registry.h"

namespace epigemm {

enum class EpilogueId : int {
#define EPIGEMM_EPILOGUE(name, Functor, forms) name,
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};

constexpr int kEpilogueCount = 0
#define EPIGEMM_EPILOGUE(name, Functor, forms) +1
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
    ;

}  // namespace epigemm
