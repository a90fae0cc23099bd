#include "elementwise/launch.h"

namespace epigemm::cuda {

#define EPIGEMM_EPILOGUE(name, Functor, forms)   \
  void launch_##name(const ElementwiseProblem&); \
  void launch_derivative_of_##name(const DerivativeProblem&);
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE

namespace {

using Launch = void (*)(const ElementwiseProblem&);

constexpr Launch kLaunches[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms) &launch_##name,
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};

using LaunchDerivative = void (*)(const DerivativeProblem&);

constexpr LaunchDerivative kDerivatives[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms) &launch_derivative_of_##name,
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};

}  // namespace

void launch(const ElementwiseProblem& problem) { kLaunches[static_cast<int>(problem.epilogue)](problem); }

void launch_derivative(const DerivativeProblem& problem) { kDerivatives[static_cast<int>(problem.epilogue)](problem); }

}  // namespace epigemm::cuda
