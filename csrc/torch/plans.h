// Plans in words: what _plan_linear, _plan_split and _explain_linear answer, as JSON; and plans that a caller forces.
#pragma once

#include <functional>

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

// {"fused", "why_not"} and, where fused, the first candidate's plan and the list of all of them.
std::string plan_json(const std::string& why_not, const std::vector<Candidate>& candidates,
                      const DescribeTile& describe, const std::string& more = "");

// [tile_index, raster, max_swizzle, splits] as a plan; splits may be left out for 1.
Plan forced_plan(const std::vector<int64_t>& numbers, int tile_count);

ElementType element_named(const Name& name);

}  // namespace epigemm::binding
