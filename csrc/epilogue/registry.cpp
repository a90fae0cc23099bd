#include "epilogue/registry.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <type_traits>

#include "epilogue/builtin.h"
#include "epilogue/headers.h"

namespace epigemm {
namespace {

// Whether it may follow a product. When its kernels are linked is no matter here.
constexpr bool PRELINKED = true, LINKED = true, ELEMENTWISE_ONLY = false;

// A functor names what the figures of the cheapest kind of functor do not have (gemm/planner/cost.h).
template <class Functor, class = void>
constexpr FunctorCost kCost = {};
template <class Functor>
constexpr FunctorCost kCost<Functor, std::void_t<decltype(Functor::primitives)>> = functor_cost(Functor::primitives);

// Where an epilogue has a bias it is its first operand.
template <class Functor>
constexpr int bias_of() {
  return Functor::operands.size() > 1 && std::string_view(Functor::operands[1].name) == "bias" ? 1 : 0;
}

constexpr EpilogueInfo kEpilogues[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms)                                                             \
  {EpilogueId::name,   #name,         #Functor, forms, Functor::operands.data(), Functor::operands.size(), \
   bias_of<Functor>(), kCost<Functor>},
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};

#define EPIGEMM_EPILOGUE(name, Functor, forms)                         \
  static_assert(Functor::operands[0].kind == OperandKind::Accumulator, \
                #Functor ": the accumulator is the first operand");    \
  static_assert(Functor::operands.size() <= kMaxBuiltinOperands + 1, #Functor ": too many operands");
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE

// --- registered while the process runs ------------------------------------------------------------------------------

constexpr int kMostRegistered = 1 << 14;

struct Registered {
  std::string name;
  std::vector<RegisteredOperand> named;
  std::vector<Operand> operands;
  EpilogueInfo info;
};

// Read without a lock: an entry never changes once its pointer is there.
struct Table {
  std::atomic<const Registered*> entries[kMostRegistered]{};
  std::atomic<int> count{0};
  std::mutex mutex;  // of those who register
};

// Never destroyed: calls may come while the process ends.
Table& table() {
  static auto* const all = new Table;
  return *all;
}

const Registered* find_registered(const char* name, std::size_t length) {
  Table& all = table();
  for (int i = 0, count = all.count.load(std::memory_order_acquire); i < count; ++i) {
    const Registered* const entry = all.entries[i].load(std::memory_order_acquire);
    if (entry->name.size() == length && std::memcmp(entry->name.data(), name, length) == 0) return entry;
  }
  return nullptr;
}

bool are_same(const std::vector<RegisteredOperand>& some, const std::vector<RegisteredOperand>& others) {
  return std::equal(some.begin(), some.end(), others.begin(), others.end(), [](const auto& a, const auto& b) {
    return a.kind == b.kind && a.element == b.element && a.name == b.name && a.shares_rows == b.shares_rows;
  });
}

std::unique_ptr<Registered> make_entry(const std::string& name, const std::vector<RegisteredOperand>& operands,
                                       int bias, const FunctorCost& cost, bool has_store, int index) {
  auto entry = std::make_unique<Registered>();
  entry->name = name;
  entry->named = operands;
  for (const RegisteredOperand& operand : entry->named) {
    entry->operands.push_back({operand.kind, operand.element, operand.name.c_str(), operand.shares_rows});
  }
  entry->info = {static_cast<EpilogueId>(kEpilogueCount + index),
                 entry->name.c_str(),
                 /*functor=*/nullptr,
                 /*linear=*/true,
                 entry->operands.data(),
                 static_cast<int>(entry->operands.size()),
                 bias,
                 cost,
                 has_store};
  return entry;
}

const EpilogueInfo* find_built_in(const char* name, std::size_t length) {
  for (const EpilogueInfo& info : kEpilogues) {
    if (std::strlen(info.name) == length && std::memcmp(info.name, name, length) == 0) return &info;
  }
  return nullptr;
}

}  // namespace

const EpilogueInfo* epilogues() { return kEpilogues; }

bool has_compiled_elementwise(EpilogueId id) { return static_cast<int>(id) < kEpilogueCount; }

const EpilogueInfo& epilogue_info(EpilogueId id) {
  if (static_cast<int>(id) < kEpilogueCount) return kEpilogues[static_cast<int>(id)];
  return table().entries[static_cast<int>(id) - kEpilogueCount].load(std::memory_order_acquire)->info;
}

const EpilogueInfo* epilogue_at(int64_t index) {
  if (index < 0 || index >= kEpilogueCount + table().count.load(std::memory_order_acquire)) return nullptr;
  return &epilogue_info(static_cast<EpilogueId>(index));
}

int first_matrix(const EpilogueInfo& epilogue) {
  for (int i = 1; i < epilogue.operand_count; ++i) {
    if (epilogue.operands[i].kind == OperandKind::Matrix) return i;
  }
  return 0;
}

const EpilogueInfo* find_epilogue(const char* name, std::size_t length) {
  if (const EpilogueInfo* const info = find_built_in(name, length)) return info;
  const Registered* const entry = find_registered(name, length);
  return entry ? &entry->info : nullptr;
}

EpilogueId register_epilogue(const std::string& name, const std::vector<RegisteredOperand>& operands, int bias,
                             const FunctorCost& cost, bool has_store) {
  if (find_built_in(name.data(), name.size())) {
    throw std::invalid_argument("an epilogue of epigemm's own is named '" + name + "'");
  }
  Table& all = table();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (const Registered* const known = find_registered(name.data(), name.size())) {
    if (are_same(known->named, operands) && known->info.has_store == has_store) return known->info.id;
    throw std::invalid_argument("the epilogue '" + name + "' is there already, with other operands");
  }
  const int index = all.count.load(std::memory_order_relaxed);
  if (index == kMostRegistered) throw std::length_error("too many epilogues in one process");
  const Registered* const entry = make_entry(name, operands, bias, cost, has_store, index).release();
  all.entries[index].store(entry, std::memory_order_release);
  all.count.store(index + 1, std::memory_order_release);
  return entry->info.id;
}

}  // namespace epigemm
