#include "link/kernels.h"

#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "link/load.h"

namespace epigemm::link {
namespace {

// The kernels of one epilogue for one architecture, by name. There are few, so a search tree is as fast as a hash
// table. std::less<> compares views with strings.
using ByName = std::map<std::string, const void*, std::less<>>;

// Every launch of a linked epilogue looks up its kernel. Kernels are rarely added.
struct Table {
  std::shared_mutex mutex;
  std::map<std::pair<EpilogueId, int>, ByName> kernels;  // by epilogue and compute capability
};

// Never destroyed: calls may come while the process ends.
Table& table() {
  static auto* const all = new Table;
  return *all;
}

}  // namespace

const void* find(EpilogueId epilogue, int capability, open::KernelName kernel) {
  Table& all = table();
  std::shared_lock lock(all.mutex);
  const auto of_epilogue = all.kernels.find({epilogue, capability});
  if (of_epilogue == all.kernels.end()) return nullptr;
  const auto found = of_epilogue->second.find(kernel);
  return found == of_epilogue->second.end() ? nullptr : found->second;
}

bool find(EpilogueId epilogue, int capability, const open::KernelNames& names, open::Kernels* kernels) {
  for (int i = 0; i < names.count; ++i) {
    kernels->handles[i] = find(epilogue, capability, names.names[i]);
    if (!kernels->handles[i]) return false;
  }
  return true;
}

const char* add(EpilogueId epilogue, int capability, open::KernelName kernel, const void* cubin) {
  if (find(epilogue, capability, kernel)) return nullptr;
  const std::string name(kernel);
  const void* loaded = nullptr;
  if (const char* const refused = load(cubin, name.c_str(), &loaded)) return refused;
  Table& all = table();
  std::unique_lock lock(all.mutex);
  all.kernels[{epilogue, capability}].emplace(name, loaded);
  return nullptr;
}

}  // namespace epigemm::link
