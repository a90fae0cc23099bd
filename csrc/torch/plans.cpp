#include "torch/plans.h"

#include <algorithm>

namespace epigemm::binding {
namespace {

// `measured`: microseconds, 0 where only the cost model's are known.
void write_plan(std::ostream& json, const Candidate& candidate, double measured, const DescribeTile& describe) {
  const Plan& plan = candidate.plan;
  const TileText tile = describe(candidate.plan.tile);
  json << "\"tile_index\": " << candidate.plan.tile << ", \"tile\": \"" << tile.m << "x" << tile.n << "x" << tile.k
       << "\", \"cluster\": \"" << tile.cluster_m << "x" << tile.cluster_n << "\", \"schedule\": \"" << tile.schedule
       << (tile.transposed ? " transposed" : "") << "\", \"raster\": \""
       << (candidate.plan.raster == Raster::AlongM ? "along_m" : "along_n") << "\", \"swizzle\": " << plan.swizzle
       << ", \"splits\": " << plan.splits << ", \"plan\": [" << plan.tile << ", " << static_cast<int>(plan.raster)
       << ", " << plan.swizzle << ", " << plan.splits << "], \"predicted_us\": " << candidate.microseconds;
  if (measured > 0) json << ", \"measured_us\": " << measured;
}

bool same_plan(const Plan& a, const Plan& b) {
  return a.tile == b.tile && a.raster == b.raster && a.swizzle == b.swizzle && a.splits == b.splits;
}

// The measured plan first. The model's time for it is that of its tile, with whatever raster and swizzle.
std::vector<Candidate> with_measured(std::vector<Candidate> candidates, const Plan& measured) {
  double predicted = 0;
  for (const Candidate& candidate : candidates) {
    if (candidate.plan.tile == measured.tile) predicted = candidate.microseconds;
  }
  const auto is_measured = [&](const Candidate& candidate) { return same_plan(candidate.plan, measured); };
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), is_measured), candidates.end());
  candidates.insert(candidates.begin(), {measured, predicted});
  return candidates;
}

}  // namespace

std::string plan_json(const Answer& answer, const DescribeTile& describe, const std::string& more) {
  const std::optional<tuned::Choice>& measured = answer.measured;
  const std::vector<Candidate> candidates =
      measured ? with_measured(answer.candidates, measured->plan) : answer.candidates;
  const auto measured_us = [&](std::size_t i) { return measured && i == 0 ? measured->fused_microseconds : 0; };
  const char* source = !measured ? "model" : measured->shipped ? "default" : "cache";
  const bool fused = answer.why_not.empty();
  std::ostringstream json;
  json << "{\"fused\": " << (fused ? "true" : "false") << ", \"why_not\": \"" << answer.why_not << "\", \"source\": \""
       << source << "\", \"second_path_us\": " << answer.second_path_microseconds << more;
  if (measured) json << ", \"second_path_measured_us\": " << measured->second_path_microseconds;
  if (fused) {
    json << ", ";
    write_plan(json, candidates.front(), measured_us(0), describe);
  }
  json << ", \"candidates\": [";
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    json << (i ? ", {" : "{");
    write_plan(json, candidates[i], measured_us(i), describe);
    json << "}";
  }
  json << "]}";
  return json.str();
}

Plan forced_plan(const std::vector<int64_t>& numbers, int tile_count) {
  check(numbers.size() == 3 || numbers.size() == 4,
        "plan must be [tile_index, raster, max_swizzle, splits], splits left out for 1, or empty, got ", numbers.size(),
        " numbers");
  check(numbers[0] >= 0 && numbers[0] < tile_count, "plan: tile_index must be in 0..", tile_count - 1, ", got ",
        numbers[0]);
  check(numbers[1] == 0 || numbers[1] == 1, "plan: raster must be 0 (along M) or 1 (along N), got ", numbers[1]);
  check(numbers[2] >= 1 && numbers[2] <= 8, "plan: max_swizzle must be in 1..8, got ", numbers[2]);
  const int64_t splits = numbers.size() == 4 ? numbers[3] : 1;
  check(splits == 1 || splits == 2 || splits == 4 || splits == 8, "plan: splits must be 1, 2, 4 or 8, got ", splits);
  return {static_cast<int>(numbers[0]), static_cast<Raster>(numbers[1]), static_cast<int>(numbers[2]),
          static_cast<int>(splits)};
}

ElementType element_named(const Name& name) {
  for (ElementType element :
       {ElementType::Float16, ElementType::BFloat16, ElementType::Float32, ElementType::Float64}) {
    if (name.text() == element_name(element)) return element;
  }
  fail("dtype '", name.text(), "' is unknown; there are float16, bfloat16, float32, float64");
}

}  // namespace epigemm::binding
