#include "gemm/planner/measured.h"

#include <cstdio>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "gemm/planner/fallback.h"
#include "gemm/planner/family.h"
#include "gemm/planner/hash.h"
#include "gemm/planner/plan_cache.h"

namespace epigemm::measured {
namespace {

struct KeyHash {
  std::size_t operator()(const Key& key) const {
    return hash_of({static_cast<int64_t>(std::hash<std::string>()(key.epilogue)), static_cast<int64_t>(key.element),
                    static_cast<int64_t>(key.arithmetic), key.is_packed, key.has_one_kernel_fallback,
                    key.is_tf32_allowed, key.sizes.m, key.sizes.n, key.sizes.k, key.sizes.batch});
  }
};

struct Tables {
  std::shared_mutex mutex;
  std::unordered_map<Key, Choice, KeyHash> of_device[kMostDevices];
};

Tables& tables() {
  static Tables tables;
  return tables;
}

}  // namespace

bool Key::operator==(const Key& other) const {
  return epilogue == other.epilogue && element == other.element && arithmetic == other.arithmetic &&
         is_packed == other.is_packed && has_one_kernel_fallback == other.has_one_kernel_fallback &&
         is_tf32_allowed == other.is_tf32_allowed && sizes == other.sizes;
}

Key key_of(const Problem& problem) {
  const bool on_slices = problem.arithmetic == Arithmetic::Split || problem.arithmetic == Arithmetic::Scaled;
  Key key;
  key.epilogue = epilogue_info(problem.epilogue).name;
  key.element = problem.x.element;
  key.arithmetic = problem.arithmetic;
  key.is_packed = on_slices && problem.is_packed;
  key.has_one_kernel_fallback = is_fallback_one_kernel(problem);
  // A fused TF32 kernel is always compared with a TF32 GEMM.
  key.is_tf32_allowed =
      problem.x.element == ElementType::Float32 && (problem.is_tf32_allowed || problem.arithmetic == Arithmetic::TF32);
  key.sizes = problem;
  return key;
}

void load(int device, const std::vector<Row>& rows) {
  {
    const std::unique_lock<std::shared_mutex> lock(tables().mutex);
    auto& table = tables().of_device[device];
    if (rows.empty()) table.clear();
    for (const Row& row : rows) table[row.first] = row.second;
  }
  plan_cache::clear();
}

std::optional<Choice> find(int device, const Key& key) {
  if (device < 0 || device >= kMostDevices) return std::nullopt;
  const std::shared_lock<std::shared_mutex> lock(tables().mutex);
  const auto& table = tables().of_device[device];
  const auto found = table.find(key);
  return found == table.end() ? std::nullopt : std::optional<Choice>(found->second);
}

std::string tiles_fingerprint() {
  std::string text;
  for (int id = 0; id < kFamilyCount; ++id) {
    text += family_name(static_cast<FamilyId>(id));
    text += family_of(static_cast<FamilyId>(id)).fingerprint();
  }
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3u;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

}  // namespace epigemm::measured
