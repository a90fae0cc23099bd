#include "torch/plans.h"

namespace epigemm::binding {
namespace {

void write_plan(std::ostream& json, const Candidate& candidate, const DescribeTile& describe) {
  const TileText tile = describe(candidate.plan.tile);
  json << "\"tile_index\": " << candidate.plan.tile << ", \"tile\": \"" << tile.m << "x" << tile.n << "x" << tile.k
       << "\", \"cluster\": \"" << tile.cluster_m << "x" << tile.cluster_n << "\", \"schedule\": \"" << tile.schedule
       << (tile.transposed ? " transposed" : "") << "\", \"raster\": \""
       << (candidate.plan.raster == Raster::AlongM ? "along_m" : "along_n")
       << "\", \"swizzle\": " << candidate.plan.swizzle << ", \"splits\": " << candidate.plan.splits << ", \"plan\": ["
       << candidate.plan.tile << ", " << static_cast<int>(candidate.plan.raster) << ", " << candidate.plan.swizzle
       << ", " << candidate.plan.splits << "], \"predicted_us\": " << candidate.microseconds;
}

}  // namespace

std::string plan_json(const std::string& why_not, const std::vector<Candidate>& candidates,
                      const DescribeTile& describe, const std::string& more) {
  std::ostringstream json;
  json << "{\"fused\": " << (why_not.empty() ? "true" : "false") << ", \"why_not\": \"" << why_not << "\"" << more;
  if (why_not.empty()) {
    json << ", ";
    write_plan(json, candidates.front(), describe);
    json << ", \"candidates\": [";
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      json << (i ? ", {" : "{");
      write_plan(json, candidates[i], describe);
      json << "}";
    }
    json << "]";
  }
  json << "}";
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
