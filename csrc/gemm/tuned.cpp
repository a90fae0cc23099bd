#include "gemm/tuned.h"

#include <atomic>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>

#include "gemm/narrow/tiles.h"
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

// A hash table that readers walk without a lock: a row is prepended to its chain, and nothing is ever taken out. The
// row that it replaces stays behind it, for those who are just reading it.
class Table {
 public:
  void add(const Row& row) {
    std::atomic<const Node*>& chain = chains_[chain_of(row.first)];
    nodes_.push_back({row, chain.load(std::memory_order_relaxed)});
    chain.store(&nodes_.back(), std::memory_order_release);
  }

  const Choice* find(const Key& key) const {
    const Node* node = chains_[chain_of(key)].load(std::memory_order_acquire);
    while (node && !(node->row.first == key)) node = node->next;
    return node ? &node->row.second : nullptr;
  }

 private:
  struct Node {
    Row row;
    const Node* next;
  };

  static constexpr std::size_t kChains = 8192;
  static std::size_t chain_of(const Key& key) { return Hash()(key) % kChains; }

  std::deque<Node> nodes_;  // whose addresses stay
  std::atomic<const Node*> chains_[kChains] = {};
};

struct Tables {
  std::mutex mutex;  // of writers
  std::vector<std::unique_ptr<Table>> owned;
  std::atomic<Table*> of_device[kMostDevices] = {};
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

void add(std::string* text, const narrow::Tile& tile) {
  for (const int number : {tile.m, tile.n, tile.stages, tile.ctas_per_multiprocessor}) {
    *text += std::to_string(number) + ",";
  }
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
  const std::lock_guard<std::mutex> lock(all.mutex);
  Table* table = all.of_device[device].load(std::memory_order_relaxed);
  if (!table) {
    all.owned.push_back(std::make_unique<Table>());
    table = all.owned.back().get();
  }
  for (const Row& row : rows) table->add(row);
  all.of_device[device].store(table, std::memory_order_release);
}

// The table itself stays: another thread may be reading it.
void clear(int device) { tables().of_device[device].store(nullptr, std::memory_order_release); }

std::optional<Choice> find(int device, const Key& key) {
  if (device < 0 || device >= kMostDevices) return std::nullopt;
  const Table* table = tables().of_device[device].load(std::memory_order_acquire);
  const Choice* choice = table ? table->find(key) : nullptr;
  return choice ? std::optional<Choice>(*choice) : std::nullopt;
}

std::string tiles_fingerprint() {
  std::string text;
  add_all(&text, "sm90:", sm90::kTiles);
  add_all(&text, "narrow:", narrow::kTiles);
  add_all(&text, "split:", split::kSplitTiles);
  add_all(&text, "scaled:", split::kScaledTiles);
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3u;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

}  // namespace epigemm::tuned
