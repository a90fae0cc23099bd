#include "gemm/sm90_fp16x3/kernels.h"

#include "gemm/launch.h"
#include "gemm/sm90_fp16x3/open.h"
#include "gemm/sm90_fp16x3/repair.h"
#include "gemm/sm90_fp16x3/split_rows.h"
#include "gemm/sm90_fp16x3/tiles.h"
#include "link/kernels.h"

namespace epigemm::sm90_fp16x3 {

#define EPIGEMM_DECLARE_LINEAR_AND_ELEMENTWISE(name)                   \
  const char* launch_##name##_split(SplitProblem const&, Plan const&); \
  const char* launch_##name##_scaled(SplitProblem const&, Plan const&);
#define EPIGEMM_DECLARE_ELEMENTWISE_ONLY(name)
#define EPIGEMM_EPILOGUE(name, Functor, forms) EPIGEMM_DECLARE_##forms(name)
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE

namespace {

using LaunchGemm = const char* (*)(SplitProblem const&, Plan const&);

struct Unit {
  LaunchGemm split, scaled;
};

#define EPIGEMM_UNIT_LINEAR_AND_ELEMENTWISE(name) {&launch_##name##_split, &launch_##name##_scaled},
#define EPIGEMM_UNIT_ELEMENTWISE_ONLY(name) {nullptr, nullptr},
constexpr Unit kUnits[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms) EPIGEMM_UNIT_##forms(name)
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};

const char* launch_gemm(SplitProblem const& split, Plan const& plan) {
  const Problem& problem = split.problem;
  if (!is_built_in(problem.epilogue)) {
    return launch_open(split, plan, link::find(problem.epilogue, link::key_of(problem, plan)));
  }
  const Unit& unit = kUnits[static_cast<int>(problem.epilogue)];
  return (problem.arithmetic == Arithmetic::Split ? unit.split : unit.scaled)(split, plan);
}

// The GEMM and the repair behind it.
bool is_linked(Problem const& problem, Plan const& plan) {
  link::KernelKey fixup;
  fixup.part = link::Part::fixup;
  return is_built_in(problem.epilogue) ||
         (link::find(problem.epilogue, link::key_of(problem, plan)) && link::find(problem.epilogue, fixup));
}

const char* launch_on_slices(Problem const& problem, Plan const& plan, StridedMatrix const& x,
                             StridedMatrix const& weight) {
  if (!problem.workspace) return "fp16 pieces need a workspace";
  if (!is_linked(problem, plan)) return link::kNotLinked;
  const int pieces = pieces_of(problem.arithmetic);
  void* const x_buffer = problem.workspace;
  void* weight_buffer = problem.packed_weight;
  const auto split = [&](StridedMatrix const& matrix, void* buffer) {
    return split_rows_cuda(matrix, pieces, buffer, problem.device.index, problem.stream);
  };
  // The weight is split first, so that the GEMM, which starts beside the end of x's split, finds it finished.
  if (!weight_buffer) {
    weight_buffer = static_cast<char*>(x_buffer) + split_bytes(problem.m, problem.k, pieces);
    if (const char* const refused = split(weight, weight_buffer)) return refused;
  }
  if (const char* const refused = split(x, x_buffer)) return refused;
  const SplitProblem slices{problem, split_view(x_buffer, problem.m, problem.k, pieces),
                            split_view(weight_buffer, problem.n, problem.k, pieces)};
  const char* const refused = launch_gemm(slices, plan);
  return refused ? refused : find_repair(problem.epilogue)({slices, x, weight});
}

}  // namespace

const char* launch(Problem const& problem, Plan const& plan) {
  const StridedMatrix x = strided(problem.x, problem.m, problem.k);
  const StridedMatrix weight = strided(problem.weight, problem.n, problem.k);
  if (problem.arithmetic != Arithmetic::IEEE) return launch_on_slices(problem, plan, x, weight);
  return find_fp32(problem.epilogue)({{problem, {}, {}}, x, weight});
}

int kernel_count() {
  int units = 0;
  for (const Unit& unit : kUnits) units += unit.split ? 1 : 0;
  return units * (kSplitTileCount + kScaledTileCount);
}

}  // namespace epigemm::sm90_fp16x3
