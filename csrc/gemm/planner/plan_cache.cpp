#include "gemm/planner/plan_cache.h"

#include <array>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "gemm/planner/hash.h"

namespace epigemm::plan_cache {
namespace {

constexpr std::size_t kMostPlans = 1 << 16;  // with more, the cache is emptied; a few MB

// Flags and small numbers share one integer. Everything of the problem on which plans depend must be in the key.
using Key = std::array<int64_t, 15>;

Key key_of(const Problem& p) {
  int64_t kinds = 0;
  for (const int64_t kind :
       {static_cast<int64_t>(p.epilogue), static_cast<int64_t>(p.arithmetic), static_cast<int64_t>(p.x.element),
        static_cast<int64_t>(p.weight.element), static_cast<int64_t>(p.out.element)}) {
    kinds = kinds << 8 | kind;
  }
  int64_t flags = p.alignment >= 16 ? 16 : p.alignment;
  for (const bool flag :
       {p.has_bias, p.are_operands_contiguous, p.is_packed, p.is_tf32_allowed, p.is_batch_invariant, p.is_out_padded,
        p.is_pair, p.x_scale.is_of_blocks, p.out_scale.is_of_blocks, p.has_column_moments, p.is_any_family_offered,
        p.is_weight_readable, p.is_weight_transposed, p.groups.are_alike, p.copies.x, p.copies.weight, p.copies.out}) {
    flags = flags << 1 | static_cast<int64_t>(flag);
  }
  return {kinds,
          flags,
          p.device.index,
          p.m,
          p.n,
          p.k,
          p.batch,
          p.x.row_stride,
          p.x.column_stride,
          p.weight.row_stride,
          p.weight.column_stride,
          p.out.row_stride,
          p.out.column_stride,
          p.groups.count,
          p.groups.weight_stride};
}

struct KeyHash {
  std::size_t operator()(const Key& k) const {
    return hash_of({k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7], k[8], k[9], k[10], k[11], k[12], k[13], k[14]});
  }
};

struct Cache {
  std::shared_mutex mutex;
  std::unordered_map<Key, Candidate, KeyHash> plans;
  std::atomic<uint64_t> generation{0};
};

Cache& cache() {
  static Cache cache;
  return cache;
}

// All described devices have the index -1, so the key would be the same for them.
bool is_remembered(const Problem& problem) { return problem.device.index >= 0; }

}  // namespace

std::optional<Candidate> find(const Problem& problem) {
  if (!is_remembered(problem)) return std::nullopt;
  const Key key = key_of(problem);
  const std::shared_lock<std::shared_mutex> lock(cache().mutex);
  const auto found = cache().plans.find(key);
  return found == cache().plans.end() ? std::nullopt : std::optional<Candidate>(found->second);
}

uint64_t generation() { return cache().generation.load(); }

void put(const Problem& problem, const Candidate& candidate, uint64_t generation) {
  if (!is_remembered(problem)) return;
  const Key key = key_of(problem);
  const std::unique_lock<std::shared_mutex> lock(cache().mutex);
  if (generation != cache().generation.load()) return;
  if (cache().plans.size() >= kMostPlans) cache().plans.clear();
  cache().plans[key] = candidate;
}

void clear() {
  const std::unique_lock<std::shared_mutex> lock(cache().mutex);
  ++cache().generation;
  cache().plans.clear();
}

}  // namespace epigemm::plan_cache
