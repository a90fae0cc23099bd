// epigemm::_load_measured: loads measured choices into the planner's tables.
#include "gemm/planner/measured.h"

#include <iterator>

#include "call/forced.h"
#include "gemm/planner/family.h"
#include "gemm/planner/planner.h"
#include "torch/plans.h"

namespace epigemm::binding {
namespace {

// The columns of a row. Indices are those of the enumerations.
enum Column {
  kElement,
  kArithmetic,
  kPacked,
  kHasBias,
  kTF32Allowed,
  kM,
  kN,
  kK,
  kFamily,
  kTile,
  kRaster,
  kSwizzle,
  kSplits,
  kFusedNanoseconds,
  kFallbackNanoseconds,
  kColumns,
};

Problem problem_of(const int64_t* row) {
  check(row[kElement] >= 0 && row[kElement] <= 2, "rows: there is no fused kernel for element ", row[kElement]);
  check(row[kArithmetic] >= 0 && row[kArithmetic] <= 3, "rows: there is no arithmetic ", row[kArithmetic]);
  check(row[kM] > 0 && row[kN] > 0 && row[kK] > 0, "rows: m, n and k must be positive, got ", row[kM], ", ", row[kN],
        ", ", row[kK]);
  const auto element = static_cast<ElementType>(row[kElement]);
  check(element == ElementType::Float32 || row[kArithmetic] == static_cast<int64_t>(Arithmetic::IEEE),
        "rows: only float32 has a choice of arithmetics");
  Problem problem;
  problem.arithmetic = static_cast<Arithmetic>(row[kArithmetic]);
  problem.m = row[kM];
  problem.n = row[kN];
  problem.k = row[kK];
  problem.x.element = problem.weight.element = problem.out.element = element;
  problem.out.row_stride = problem.n;
  problem.has_bias = row[kHasBias] != 0;
  problem.is_packed = row[kPacked] != 0;
  problem.is_tf32_allowed = row[kTF32Allowed] != 0;
  return problem;
}

measured::Choice choice_of(const Problem& problem, const int64_t* row) {
  constexpr double kMicrosecond = 1e-3;
  check(row[kFusedNanoseconds] > 0 && row[kFallbackNanoseconds] > 0, "rows: times must be positive");
  measured::Choice choice;
  check(row[kFamily] >= 0, "plan: family must be in 0..", kFamilyCount - 1, ", got ", row[kFamily]);
  int64_t numbers[] = {static_cast<int64_t>(problem.arithmetic), 0, 0, 0, 0, 0};
  std::copy(row + kFamily, row + kSplits + 1, numbers + 1);
  call::ForcedPlan forced;
  const std::string wrong = call::read_forced(numbers, std::size(numbers), /*is_pair=*/false, &forced);
  check(wrong.empty(), "plan: ", wrong);
  choice.plan = forced.plan;
  check(choice.plan.is_fused() && family_of(choice.plan.family).computes(problem), "plan: family ", row[kFamily],
        " does not multiply in this arithmetic");
  choice.fused_microseconds = kMicrosecond * static_cast<double>(row[kFusedNanoseconds]);
  choice.fallback_microseconds = kMicrosecond * static_cast<double>(row[kFallbackNanoseconds]);
  return choice;
}

// `epilogues`: the name of each row's, with commas between them. Device -1: the rows are only checked.
void load_measured(int64_t device, const Name& epilogues, const std::vector<int64_t>& numbers) {
  check(device >= -1 && device < measured::kMostDevices, "device must be the index of a CUDA device, got ", device);
  const std::vector<std::string> names = split(epilogues.text());
  check(numbers.size() == names.size() * kColumns, "rows must hold ", static_cast<int>(kColumns), " numbers each, got ",
        numbers.size(), " for ", names.size(), " epilogues");
  std::vector<measured::Row> rows;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const int64_t* const row = &numbers[i * kColumns];
    Problem problem = problem_of(row);
    // One that is made at run time need not be there yet. Of such a one no kernel of the fallback does everything.
    const EpilogueInfo* const known = find_epilogue(names[i].data(), names[i].size());
    if (known) problem.epilogue = known->id;
    measured::Key key = measured::key_of(problem);
    key.epilogue = names[i];
    key.has_one_kernel_fallback &= known != nullptr;
    rows.emplace_back(key, choice_of(problem, row));
  }
  if (device >= 0) measured::load(static_cast<int>(device), rows);
}

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_load_measured", TORCH_BOX(&epigemm::binding::load_measured));
}
