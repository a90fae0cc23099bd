#include "gemm/tuned.h"

#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "gemm/split/tiles.h"

namespace epigemm::tuned {
namespace {

struct Hash {
  std::size_t operator()(const Key& key) const {
    const auto kind = static_cast<uint64_t>(key.epilogue) << 16 | static_cast<uint64_t>(key.element) << 8 |
                      static_cast<uint64_t>(key.arithmetic) << 4 | static_cast<uint64_t>(key.packed) << 2 |
                      static_cast<uint64_t>(key.one_kernel) << 1 | static_cast<uint64_t>(key.tf32_allowed);
    uint64_t hash = kind;
    for (const int64_t number : {key.n, key.k, key.m}) {
      hash = (hash ^ static_cast<uint64_t>(number)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

using Table = std::unordered_map<Key, Choice, Hash>;

struct Tables {
  std::shared_mutex mutex;
  std::map<int, Table> of_device;
  std::atomic<bool> any{false};
};

Tables& tables() {
  static Tables tables;
  return tables;
}

void add(std::string* text, const sm90::Tile& tile) {
  for (const int number : {tile.m, tile.n, tile.cluster_m, tile.cluster_n, static_cast<int>(tile.schedule)}) {
    *text += std::to_string(number) + ",";
  }
}

void add(std::string* text, const split::Tile& tile) {
  add(text, sm90::Tile{tile.m, tile.n, tile.cluster_m, tile.cluster_n, tile.schedule});
  *text += tile.transposed ? "transposed," : "";
}

template <class Tile, std::size_t count>
void add_all(std::string* text, const char* name, const Tile (&tiles)[count]) {
  *text += name;
  for (const Tile& tile : tiles) add(text, tile);
}

}  // namespace

bool Key::operator==(const Key& other) const {
  return epilogue == other.epilogue && element == other.element && arithmetic == other.arithmetic &&
         packed == other.packed && one_kernel == other.one_kernel && tf32_allowed == other.tf32_allowed &&
         n == other.n && k == other.k && m == other.m;
}

int64_t bucket_edge(int64_t m) {
  constexpr int64_t kFirstMidpointAbove = 64;
  int64_t edge = 1;
  while (edge < m && edge < kLargestBucket) edge *= 2;
  return edge > kFirstMidpointAbove && m <= edge / 4 * 3 ? edge / 4 * 3 : edge;
}

void load(int device, const std::vector<Row>& rows) {
  Tables& all = tables();
  const std::unique_lock<std::shared_mutex> lock(all.mutex);
  Table& table = all.of_device[device];
  for (const auto& [key, choice] : rows) table.insert_or_assign(key, choice);
  if (!rows.empty()) all.any.store(true, std::memory_order_release);
}

void clear(int device) {
  Tables& all = tables();
  const std::unique_lock<std::shared_mutex> lock(all.mutex);
  all.of_device.erase(device);
  all.any.store(!all.of_device.empty(), std::memory_order_release);
}

std::optional<Choice> find(int device, const Key& key) {
  Tables& all = tables();
  if (!all.any.load(std::memory_order_acquire)) return std::nullopt;
  const std::shared_lock<std::shared_mutex> lock(all.mutex);
  const auto table = all.of_device.find(device);
  if (table == all.of_device.end()) return std::nullopt;
  const auto found = table->second.find(key);
  if (found == table->second.end()) return std::nullopt;
  return found->second;
}

std::string tiles_fingerprint() {
  std::string text;
  add_all(&text, "sm90:", sm90::kTiles);
  add_all(&text, "split:", split::kSplitTiles);
  add_all(&text, "scaled:", split::kScaledTiles);
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3u;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

}  // namespace epigemm::tuned
