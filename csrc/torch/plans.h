// Plans in words: what _plan_linear, _plan_split and _explain_linear answer, as JSON; and plans that a caller forces.
#pragma once

#include <functional>
#include <optional>

#include "gemm/dispatch.h"
#include "gemm/sm90/tiles.h"
#include "torch/arguments.h"

namespace epigemm::binding {

// A tile as its description needs it, whichever family of kernels it is from.
struct TileText {
  int m, n, k;  // elements
  int cluster_m, cluster_n;
  const char* schedule;
  bool transposed;
};

constexpr const char* schedule_name(sm90::Schedule schedule) {
  return schedule == sm90::Schedule::Cooperative ? "cooperative" : "pingpong";
}

using DescribeTile = std::function<TileText(int tile_index)>;

// What dispatch knows about a problem: why no fused kernel runs, if none does; the cost model's candidates, none where
// no kernel covers the problem; and what was measured.
struct Answer {
  std::string why_not;
  std::vector<Candidate> candidates;
  std::optional<tuned::Choice> measured;
  double second_path_microseconds = 0;
};

// {"fused", "why_not", "source", "second_path_us", "candidates"} and, where fused, the plan of the first candidate.
// `more`: further members.
std::string plan_json(const Answer& answer, const DescribeTile& describe, const std::string& more = "");

// [tile_index, raster, max_swizzle] or, with the CTAs that share the K of a tile, [..., splits], as a plan.
Plan forced_plan(const std::vector<int64_t>& numbers, int tile_count);

ElementType element_named(const Name& name);

}  // namespace epigemm::binding
