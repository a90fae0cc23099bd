#include "gemm/planner/planner.h"
#include "epilogue/builtin.h"

#include <algorithm>
#include <limits>

#include "gemm/planner/architecture.h"
#include "gemm/planner/copies.h"
#include "gemm/planner/cost.h"
#include "gemm/planner/fallback.h"
#include "gemm/planner/family.h"
#include "gemm/planner/plan_cache.h"
#include "gemm/text.h"

namespace epigemm {
namespace {

bool has_store(const Problem& problem) { return epilogue_info(problem.epilogue).has_store; }

template <class Visit>
void for_each_family(const Problem& problem, Visit visit) {
  for (int id = 0; id < kFamilyCount; ++id) {
    const Family& family = family_of(static_cast<FamilyId>(id));
    const bool takes = (family.stores() || !has_store(problem)) && (family.takes_groups() || !problem.groups);
    if (takes && family.computes(problem)) visit(family);
  }
}

// Why the kernels of no family run on the device; empty if some do. Those that are linked at first use run on most
// devices: their reason is given.
std::string why_not_on_device(const Problem& problem) {
  std::string reason;
  for (int id = 0; id < kFamilyCount; ++id) {
    const Family& family = family_of(static_cast<FamilyId>(id));
    const std::string own = family.why_not_on(problem.device);
    if (own.empty()) return own;
    if (reason.empty() || !family.is_prelinked()) reason = own;
  }
  return reason;
}

// Why no family computes the problem, whatever the operands' layout; empty if one does.
std::string why_not_computed(const Problem& p) {
  if (!epilogue_info(p.epilogue).linear) {
    return text("epilogue '", epilogue_info(p.epilogue).name, "' has no GEMM kernels");
  }
  if (p.device.capability == 0) return "the tensors are not on a CUDA device";
  if (p.is_empty()) {
    return text("the product is empty (M = ", p.m, ", N = ", p.n, ", K = ", p.k, ")");
  }
  bool is_computed = false;
  for_each_family(p, [&](const Family&) { is_computed = true; });
  if (is_computed) return std::string();
  // If the device has no kernels at all, that is the reason to give.
  if (std::string reason = why_not_on_device(p); !reason.empty()) return reason;
  if (has_store(p)) return "no fused kernel stores a matrix beside the result in this arithmetic";
  if (p.groups) return text("no fused kernel multiplies rows in groups in ", element_name(p.x.element));
  if (p.is_pair) return "no fused kernel multiplies x by two weights in this arithmetic";
  if (p.x.element == ElementType::Float64) {
    return "fused kernels exist for float16, bfloat16 and float32 (as TF32), not for float64";
  }
  if (is_8_bits(p.x.element)) {
    return text("no fused kernel multiplies ", element_name(p.x.element), " by ", element_name(p.weight.element),
                " to ", element_name(p.out.element));
  }
  return text("no fused kernel multiplies ", element_name(p.x.element), " by ", element_name(p.weight.element));
}

// Calls visit(family) for the families that can run the problem; returns why the others cannot.
template <class Visit>
std::string for_each_covering_family(const Problem& problem, Visit visit) {
  std::string reasons = why_not_computed(problem);
  if (!reasons.empty()) return reasons;
  for_each_family(problem, [&](const Family& family) {
    const std::string reason = family.why_not(problem);
    if (reason.empty()) {
      visit(family);
    } else if (reasons.find(reason) == std::string::npos) {
      reasons += (reasons.empty() ? "" : "; ") + reason;
    }
  });
  return reasons;
}

// A kernel that reduces blocks of rows of D behind a plan whose kernel does not (csrc/reduce). It reads D once, but by
// the clock of an H100 at two fifths of its memory's speed, also what is in L2 (16 to 134 MB in 16 bits). What merges
// the blocks is left out, because every plan needs it.
double moments_microseconds(const Problem& p) {
  constexpr double kKernelUs = 3.2;  // about what a kernel adds (copies.cpp)
  constexpr double kShareOfMemory = 0.4;
  const double bytes = element_bytes(p.out.element) * cost::as_double(p.m) * cost::as_double(p.n);
  return kKernelUs + bytes / (kShareOfMemory * p.device.memory_bytes_per_us);
}

double moments_microseconds(const Problem& problem, const Plan& plan) {
  if (!problem.has_column_moments || problem.is_empty()) return 0;
  if (plan.is_fused() && family_of(plan.family).moment_rows(problem, plan) > 0) return 0;
  return moments_microseconds(problem);
}

// Candidates, whose times include the copies on which they run, and column statistics.
template <class Visit>
void for_each_accurate_candidate(const Problem& problem, Visit visit) {
  const Problem on = on_copies(problem);
  const double copies_us = copies_microseconds(problem);
  for_each_covering_family(on, [&](const Family& family) {
    family.for_each_candidate(on, [&](const Candidate& candidate) {
      if (!family.why_not_accurate(on, candidate.plan).empty()) return;
      visit({candidate.plan, candidate.microseconds + copies_us + moments_microseconds(problem, candidate.plan)});
    });
  });
}

// The fastest fused plan by prediction; with an infinite time if there is none.
Candidate best_candidate(const Problem& problem) {
  Candidate best{{}, std::numeric_limits<double>::infinity()};
  for_each_accurate_candidate(problem, [&](const Candidate& candidate) {
    if (candidate.microseconds < best.microseconds) best = candidate;
  });
  return best;
}

// The factor by which a fused kernel must be predicted to be faster than the fallback, because a gain below the models'
// usual error may be none. Chosen on the shapes of the fit, so that nearly no call of 20 us and more becomes slower by
// more than 3 to 5%. With a very short K the time depends on writes, for which the models are least accurate.
double least_gain(const Problem& p, double fallback_us) {
  constexpr double kShortUs = 20, kOverBeforeHostUs = 9;
  constexpr int64_t kVeryShortK = 264, kShortKOnSlices = 600, kFewRows = 32, kFewRowsOfHost = 256, kLeastMedium = 65,
                    kMostMedium = 600, kFewRowsOfPairs = 1000;
  const bool is_short = fallback_us < kShortUs;
  // With few rows and a weight in whole lines the models are most accurate, and predict fused kernels rather too slow.
  const bool is_streaming =
      p.m <= kFewRows && cost::alignment_class(p.k * element_bytes(p.weight.element)) == 0 && p.k >= kVeryShortK;
  // At 19 shapes on an H100 two calls of few rows were up to a fifth faster than predicted, those of more rows were
  // not.
  if (p.is_pair) return p.m < kFewRowsOfPairs ? 1.12 : 1.03;
  switch (p.arithmetic) {
    case Arithmetic::Split:
      if (!p.is_packed) return 1.10;
      if (p.m == 1) return 1.07;  // cuBLAS's time for one row varies by a third
      return is_short && p.k < kShortKOnSlices ? 1.20 : 1.05;
    case Arithmetic::Scaled:
      return 1.12;
    case Arithmetic::TF32:
      return is_short ? 1.00 : 1.02;
    default:
      // The device finishes a call of few rows before the host has made the next one, and a fused kernel takes less of
      // the host's time than PyTorch's GEMM. At 28 such sizes on an H100 it also took the device 0.1 to 1.3 us less.
      if (p.m <= kFewRowsOfHost && fallback_us < kOverBeforeHostUs) return 0.97;
      // Here cuBLAS has many tiles and splits of K to choose from, and is up to a tenth faster than its model.
      if (p.m >= kLeastMedium && p.m <= kMostMedium && p.k >= kVeryShortK) return 1.10;
      if (is_streaming) return is_fallback_one_kernel(p) ? 1.01 : 0.97;
      if (is_fallback_one_kernel(p) && p.k < kVeryShortK) {
        // Bars by 73 random shapes on an H100: behind a very short K cuBLAS's bias and ReLU take 1.1 times the
        // predicted time in the median, and up to twice.
        if (p.epilogue == EpilogueId::bias_relu) return is_short ? 0.97 : 1.05;
        return 1.25;
      }
      if (!is_short) return 1.04;
      return is_fallback_one_kernel(p) ? 1.05 : 1.03;
  }
}

// The same on copies, whose model is not fitted. The model of PyTorch's GEMM on rows that are not whole 16 bytes is
// also less accurate than elsewhere, most of all for short times.
double least_gain_on_copies(const Problem& p, double fallback_us) {
  constexpr double kShortUs = 20, kCopied = 1.05, kShort = 1.50, kLong = 1.15;
  constexpr int64_t kWhole = 16;
  if (std::min(p.n, p.k) < kLeastCopied) return std::numeric_limits<double>::infinity();
  if (bytes_of_steps(p) % kWhole == 0) return std::max(kCopied, least_gain(p, fallback_us));
  return std::max(fallback_us < kShortUs ? kShort : kLong, least_gain(p, fallback_us));
}

bool is_by_elements(const Problem& p) {
  return element_bytes(p.x.element) == 2 && !p.copies.any() && bytes_of_steps(p) % 16 != 0;
}

// The same of kernels that read rows that are not whole 16 bytes. At 14 such shapes on an H100 the predicted ratio was
// up to a fifth too high. With an N or K so small neither model was fitted (copies.h).
double least_gain_by_elements(const Problem& p) {
  return std::min(p.n, p.k) < kLeastCopied ? std::numeric_limits<double>::infinity() : 1.20;
}

bool is_expected_to_gain(const Problem& problem, double fused_us, double fallback_us) {
  constexpr double kOnSlices = 1.2;  // of batches: neither model was fitted to them
  if (problem.groups.are_alike && is_on_slices(problem.arithmetic)) return fallback_us >= kOnSlices * fused_us;
  if (problem.groups.are_alike) return fallback_us >= fused_us && !is_fallback_one_kernel(problem);
  // In 8 bits and of groups the fallback is made by Python, and is many kernels.
  if (is_8_bits(problem.x.element) || problem.groups) return fused_us < std::numeric_limits<double>::infinity();
  const double least = problem.copies.any()      ? least_gain_on_copies(problem, fallback_us)
                       : is_by_elements(problem) ? least_gain_by_elements(problem)
                                                 : least_gain(problem, fallback_us);
  return fallback_us >= std::max(least, architecture_of(problem.device).least_gain()) * fused_us;
}

// The functor's additional time over a cheap one in the fused kernel and in the elementwise one, if it is the reason
// for the fallback.
std::string what_functor_takes(const Problem& problem, double fused_us, double fallback_us) {
  if (has_store(problem)) return {};
  Problem cheap = problem;
  cheap.epilogue = EpilogueId::relu_div;  // nearly no cost, and in two kernels
  const double cheap_us = best_candidate(cheap).microseconds, cheap_fallback_us = fallback_microseconds(cheap);
  const bool is_longer = cost::functor_cycles(problem, FunctorKernel::Elementwise) > 0 && cheap_us < fused_us;
  if (!is_longer || !is_expected_to_gain(cheap, cheap_us, cheap_fallback_us)) return {};
  return text("; beside a cheap epilogue this one takes ", fused_us - cheap_us, " us more within the product, and ",
              std::max(0.0, fallback_us - cheap_fallback_us), " us more in an elementwise kernel");
}

std::string why_not_expected(const Problem& problem, double fused_us) {
  const double fallback_us = alternative_microseconds(problem);
  if (is_expected_to_gain(problem, fused_us, fallback_us)) return std::string();
  if (problem.is_pair) {
    return text("two kernels, one after the other, are not expected to be slower by more than the predictions' error (",
                fallback_us, " us against ", fused_us, " us for one)");
  }
  if (problem.copies.any() && std::min(problem.n, problem.k) < kLeastCopied) {
    return text("with N or K below ", kLeastCopied, " nothing is copied, and no kernel reads the operands as they lie");
  }
  if (is_by_elements(problem) && std::min(problem.n, problem.k) < kLeastCopied) {
    return text("with N or K below ", kLeastCopied,
                " nothing is copied, and the kernels that read the operands as they lie have not been measured");
  }
  const char* what = has_store(problem)                             ? "a product with one elementwise kernel"
                     : problem.groups.are_alike                     ? "torch.bmm, with what follows it,"
                     : !is_fallback_expected_in_one_kernel(problem) ? "PyTorch's GEMM with one elementwise kernel"
                     : problem.epilogue == EpilogueId::bias_relu ? "PyTorch's GEMM, which adds a bias and ReLU itself,"
                                                                 : "PyTorch's GEMM, which adds a bias itself,";
  const char* gain = fallback_us > fused_us ? " is not expected to be slower by more than the predictions' error ("
                                            : " is expected to be at least as fast (";
  const bool needs_pack = problem.arithmetic == Arithmetic::Split && !problem.is_packed && !problem.groups;
  const std::string of_copies =
      problem.copies.any() ? text(", of which copies take ", copies_microseconds(problem), " us") : std::string();
  return text(what, gain, fallback_us, " us against ", fused_us, " us fused", of_copies,
              needs_pack ? ", of which the weight takes its share at every call: see pack" : "",
              what_functor_takes(problem, fused_us, fallback_us), ")");
}

Plan invariant_plan(const Problem& problem) {
  Plan plan;
  for_each_covering_family(problem, [&](const Family& family) {
    if (!plan.is_fused()) plan = family.invariant_plan(problem);
  });
  return plan;
}

constexpr double kNotTimed = std::numeric_limits<double>::infinity();

Candidate chosen(const Problem& problem) {
  constexpr Candidate kFallback{{}, kNotTimed};
  if (problem.is_batch_invariant) {
    const Plan plan = invariant_plan(problem);
    if (!plan.is_fused() || !family_of(plan.family).why_not_accurate(problem, plan).empty()) return kFallback;
    return {plan, family_of(plan.family).microseconds(problem, plan)};
  }
  if (const std::optional<measured::Choice> found = find_measured(problem)) {
    return found->is_fused() ? Candidate{found->plan, found->fused_microseconds} : kFallback;
  }
  const Candidate best = best_candidate(problem);
  return is_expected_to_gain(problem, best.microseconds, alternative_microseconds(problem)) ? best : kFallback;
}

}  // namespace

std::string why_not_covered(const Problem& problem) {
  bool is_covered = false;
  std::string reasons = for_each_covering_family(on_copies(problem), [&](const Family&) { is_covered = true; });
  return is_covered ? std::string() : reasons;
}

std::string why_not_accurate(const Problem& given) {
  const Problem problem = on_copies(given);
  std::string reasons = why_not_covered(problem);
  bool is_accurate = false;
  if (!reasons.empty()) return reasons;
  const auto look_at = [&](const Family& family, const Plan& plan) {
    std::string reason = family.why_not_accurate(problem, plan);
    if (reason.empty()) is_accurate = true;
    if (reasons.empty()) reasons = std::move(reason);
  };
  for_each_covering_family(problem, [&](const Family& family) {
    if (problem.is_batch_invariant) {
      const Plan plan = family.invariant_plan(problem);
      if (plan.is_fused()) look_at(family, plan);
    } else {
      family.for_each_candidate(problem, [&](const Candidate& candidate) { look_at(family, candidate.plan); });
    }
  });
  if (is_accurate) return std::string();
  return reasons.empty() ? "no fused kernel has a plan for these sizes" : reasons;
}

std::string why_not_fused(const Problem& problem) {
  std::string reason = why_not_accurate(problem);
  if (!reason.empty() || problem.is_batch_invariant) return reason;
  if (const std::optional<measured::Choice> found = find_measured(problem)) {
    if (found->is_fused()) return std::string();
    return text("the fallback was measured to be faster (", found->fallback_microseconds, " us against ",
                found->fused_microseconds, " us fused)");
  }
  return why_not_expected(problem, best_candidate(problem).microseconds);
}

std::string why_not_planned(const Problem& given, const Plan& plan) {
  if (!plan.is_fused()) return "the plan is the fallback's";
  const Problem problem = on_copies(given);
  const Family& family = family_of(plan.family);
  if (has_store(problem) && !family.stores())
    return text(family_name(plan.family), " stores nothing beside the result");
  if (problem.groups && !family.takes_groups()) {
    return text(family_name(plan.family), " multiplies all rows by one weight");
  }
  if (!family.computes(problem)) {
    return text(family_name(plan.family), " does not multiply ", problem.is_pair ? "by two weights" : "",
                problem.is_pair ? " " : "", "in this arithmetic");
  }
  if (std::string reason = family.why_not(problem); !reason.empty()) return reason;
  return family.why_not_planned(problem, plan);
}

namespace {

// Of an epilogue that has a store: the product with its bias, by whatever kernel is the fastest, and an elementwise
// kernel that reads it.
double several_kernels_microseconds(const Problem& problem) {
  Problem product = problem;
  product.epilogue = EpilogueId::bias;
  product.has_bias = problem.has_bias && epilogue_info(problem.epilogue).bias > 0;
  const double fused_us = best_candidate(product).microseconds;
  // PyTorch's GEMM adds a bias ahead of an elementwise kernel in 16 bits alone (fallback.cpp).
  product.has_bias = product.has_bias && element_bytes(product.x.element) == 2;
  const double saved_us = fallback_microseconds(product) - fused_us;
  return fallback_microseconds(problem) - std::max(0.0, saved_us);
}

}  // namespace

double alternative_microseconds(const Problem& problem) {
  if (has_store(problem)) return several_kernels_microseconds(problem);
  if (!problem.is_pair) return fallback_microseconds(problem) + moments_microseconds(problem, Plan{});
  const auto least = [](const Problem& p) {
    return std::min(best_candidate(p).microseconds, fallback_microseconds(p));
  };
  Problem first = problem;
  first.is_pair = false;
  // The second product is a matrix that the first one's epilogue reads.
  first.operands[first_matrix(epilogue_info(problem.epilogue)) - 1] = {problem.out.data, problem.n};
  Problem second = first;
  second.epilogue = EpilogueId::bias;
  second.has_bias = false;
  return std::max(0.0, least(first) + least(second) - kSharedStartUs);
}

std::vector<Candidate> rank_candidates(const Problem& problem) {
  if (problem.is_batch_invariant) {
    const Plan plan = invariant_plan(problem);
    if (!plan.is_fused()) return {};
    return {{plan, family_of(plan.family).microseconds(problem, plan)}};
  }
  std::vector<Candidate> candidates;
  for_each_accurate_candidate(problem, [&](const Candidate& candidate) { candidates.push_back(candidate); });
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.microseconds < b.microseconds; });
  return candidates;
}

double expected_microseconds(const Problem& problem, const Plan& plan) {
  return family_of(plan.family).microseconds(on_copies(problem), plan) + copies_microseconds(problem) +
         moments_microseconds(problem, plan);
}

bool is_tunable(const Problem& problem) {
  if (problem.is_batch_invariant || problem.is_pair || has_store(problem)) return false;
  if (is_8_bits(problem.x.element) || problem.groups) return false;  // of which the key lacks types and groups
  // The key of a measurement has no strides, so it only stands for the copies that the sizes require, and for rows that
  // are read by elements in place of these copies.
  const Copies copies = is_by_elements(problem) ? copies_for(problem) : problem.copies;
  return !copies.any() || copies == copies_for_sizes(problem);
}

std::optional<measured::Choice> find_measured(const Problem& problem) {
  if (!is_tunable(problem)) return std::nullopt;
  std::optional<measured::Choice> found = measured::find(problem.device.index, measured::key_of(problem));
  // Strides and alignment are not part of the key, so the plan may not cover these operands.
  if (found && (!why_not_covered(problem).empty() || !why_not_planned(problem, found->plan).empty() ||
                !family_of(found->plan.family).why_not_accurate(on_copies(problem), found->plan).empty())) {
    found.reset();
  }
  return found;
}

Candidate choose(const Problem& problem) {
  if (const std::optional<Candidate> known = plan_cache::find(problem)) return *known;
  const uint64_t generation = plan_cache::generation();
  Candidate candidate = chosen(problem);
  // Remembered, too: the model behind it takes a small call as long as the rest of its work on the host.
  candidate.is_one_kernel = !candidate.plan.is_fused() && is_fallback_expected_in_one_kernel(problem);
  plan_cache::put(problem, candidate, generation);
  return candidate;
}

}  // namespace epigemm
