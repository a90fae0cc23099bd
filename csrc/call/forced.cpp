#include "call/forced.h"

#include "gemm/planner/family.h"

namespace epigemm::call {
namespace {

WeightSlices slices_of(int64_t bits) {
  static char there;  // stands for a pack whose address a dry run does not need
  return {(bits & 1) != 0, bits & 2 ? &there : nullptr};
}

std::string out_of(const char* what, int64_t got, const std::string& accepted) {
  return std::string(what) + " must be " + accepted + ", got " + std::to_string(got);
}

}  // namespace

void read_slices(int64_t bits, LinearCall* call) {
  call->split = slices_of(bits & 3);
  call->scaled = slices_of(bits >> 2 & 3);
}

std::string read_forced(const int64_t* numbers, std::size_t count, bool is_pair, ForcedPlan* forced) {
  constexpr int kArithmetics = 6, kFallback = -1;
  if (count != 1 && count != 6) {
    return "got " + std::to_string(count) +
           " numbers; accepted are [arithmetic] and [arithmetic, family, tile, raster, swizzle, splits]";
  }
  if (numbers[0] < 0 || numbers[0] >= kArithmetics) return out_of("arithmetic", numbers[0], "in 0..5");
  forced->arithmetic = static_cast<Arithmetic>(numbers[0]);
  forced->is_fastest = count == 1;
  if (count == 1) return {};
  if (numbers[1] == kFallback) return {};
  if (numbers[1] < 0 || numbers[1] >= kFamilyCount) {
    return out_of("family", numbers[1], "in 0.." + std::to_string(kFamilyCount - 1));
  }
  const auto id = static_cast<FamilyId>(numbers[1]);
  Problem problem;
  problem.arithmetic = forced->arithmetic;
  if (problem.arithmetic != Arithmetic::IEEE) problem.x.element = ElementType::Float32;
  const bool is_8_bits = problem.arithmetic == Arithmetic::Promoted || problem.arithmetic == Arithmetic::Fast;
  if (is_8_bits) problem.x.element = problem.weight.element = ElementType::Float8E4M3;
  if (is_8_bits) problem.out.element = ElementType::BFloat16;  // of which there are all tiles
  problem.is_pair = is_pair;
  problem.is_weight_readable = true;
  const int tiles = family_of(id).tile_count(problem);
  if (numbers[2] < 0 || numbers[2] >= tiles) {
    return out_of("tile", numbers[2], "in 0.." + std::to_string(tiles - 1));
  }
  if (numbers[3] != 0 && numbers[3] != 1) return out_of("raster", numbers[3], "0 (along M) or 1 (along N)");
  if (numbers[4] < 1 || numbers[4] > 8) return out_of("swizzle", numbers[4], "in 1..8");
  const int64_t splits = numbers[5];
  if (splits != 1 && splits != 2 && splits != 4 && splits != 8) return out_of("splits", splits, "1, 2, 4 or 8");
  forced->plan = {id, static_cast<int>(numbers[2]), static_cast<Raster>(numbers[3]), static_cast<int>(numbers[4]),
                  static_cast<int>(splits)};
  return {};
}

}  // namespace epigemm::call
