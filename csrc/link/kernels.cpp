#include "link/kernels.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "gemm/sm90_tma/open.h"

#if EPIGEMM_WITH_CUDA
#include "link/load.h"
#endif

namespace epigemm::link {
namespace {

// --- which kernels are there ----------------------------------------------------------------------------------------

constexpr int kMostTiles = 1 << 12;

uint64_t packed(EpilogueId epilogue, const KernelKey& key) {
  uint64_t bits = static_cast<uint64_t>(epilogue);
  bits = bits << 4 | static_cast<uint64_t>(key.part);
  bits = bits << 2 | static_cast<uint64_t>(key.element);
  bits = bits << 2 | static_cast<uint64_t>(key.arithmetic);
  bits = bits * kMostTiles + static_cast<uint64_t>(key.tile);
  return bits << 1 | (key.has_matrix_by_tma ? 1 : 0);
}

// Every launch of a linked epilogue looks its kernel up; one is added now and then.
struct Table {
  std::shared_mutex mutex;
  std::unordered_map<uint64_t, const void*> kernels;
};

// Never destroyed: calls may come while the process ends.
Table& table() {
  static auto* const all = new Table;
  return *all;
}

// Fields that a part's kernels do not differ in are the same in every key.
KernelKey normal(const KernelKey& key) {
  KernelKey result;
  result.part = key.part;
  switch (key.part) {
    case Part::sm90_tma:
      result.has_matrix_by_tma = key.has_matrix_by_tma;
      [[fallthrough]];
    case Part::sm90_swap_ab:
      result.element = key.element;
      result.tile = key.tile;
      break;
    case Part::sm90_fp16x3:
      result.arithmetic = key.arithmetic;
      result.tile = key.tile;
      break;
    case Part::elementwise:
    case Part::derivative:
      result.element = key.element;
      break;
    case Part::fixup:
    case Part::fp32:
      break;
  }
  return result;
}

// --- names ----------------------------------------------------------------------------------------------------------

const char* part_name(Part part) {
  constexpr const char* names[] = {"sm90_tma", "sm90_swap_ab", "sm90_fp16x3", "fixup",
                                   "fp32",     "elementwise",  "derivative"};
  return names[static_cast<int>(part)];
}

// Of kernels that multiply: fp32 is TF32 to them.
std::string multiplied(ElementType element) { return element == ElementType::Float32 ? "tf32" : element_name(element); }

}  // namespace

std::string name(const KernelKey& key) {
  const std::string start = std::string("epigemm_open_") + part_name(key.part);
  switch (key.part) {
    case Part::sm90_tma:
    case Part::sm90_swap_ab:
      return start + "_" + multiplied(key.element) + "_" + std::to_string(key.tile) +
             (key.has_matrix_by_tma ? "_matrix" : "");
    case Part::sm90_fp16x3:
      return start + (key.arithmetic == Arithmetic::Split ? "_split_" : "_scaled_") + std::to_string(key.tile);
    case Part::elementwise:
    case Part::derivative:
      return start + "_" + element_name(key.element);
    default:
      return start;
  }
}

std::optional<KernelKey> key_named(std::string_view symbol) {
  // Looked for among all that may be: a kernel is loaded once.
  constexpr int kMostTilesOfAFamily = 16;
  for (int part = 0; part <= static_cast<int>(Part::derivative); ++part) {
    for (int element = 0; element <= static_cast<int>(ElementType::Float64); ++element) {
      // Of the parts that have one, by name; the others' keys leave it out.
      for (int arithmetic = static_cast<int>(Arithmetic::Split); arithmetic <= static_cast<int>(Arithmetic::Scaled);
           ++arithmetic) {
        for (int tile = 0; tile < 2 * kMostTilesOfAFamily; ++tile) {
          const KernelKey key{static_cast<Part>(part), static_cast<ElementType>(element),
                              static_cast<Arithmetic>(arithmetic), tile / 2, tile % 2 != 0};
          if (name(normal(key)) == symbol) return normal(key);
        }
      }
    }
  }
  return std::nullopt;
}

KernelKey key_of(const Problem& problem, const Plan& plan) {
  constexpr Part parts[] = {
#define EPIGEMM_FAMILY(name) Part::name,
#include "gemm/families.def"
#undef EPIGEMM_FAMILY
  };
  KernelKey key;
  key.part = parts[static_cast<int>(plan.family)];
  if (key.part == Part::sm90_fp16x3 && problem.arithmetic == Arithmetic::IEEE) key.part = Part::fp32;
  key.element = problem.x.element;
  key.arithmetic = problem.arithmetic;
  key.tile = plan.tile;
  key.has_matrix_by_tma = plan.family == FamilyId::sm90_tma && sm90_tma::has_matrix_by_tma(problem);
  return normal(key);
}

const void* find(EpilogueId epilogue, const KernelKey& key) {
  Table& all = table();
  std::shared_lock lock(all.mutex);
  const auto found = all.kernels.find(packed(epilogue, normal(key)));
  return found == all.kernels.end() ? nullptr : found->second;
}

#if EPIGEMM_WITH_CUDA
const char* add(EpilogueId epilogue, const KernelKey& key, const void* cubin, std::size_t) {
  if (find(epilogue, key)) return nullptr;
  const void* kernel = nullptr;
  if (const char* const refused = load(cubin, name(key).c_str(), &kernel)) return refused;
  Table& all = table();
  std::unique_lock lock(all.mutex);
  all.kernels.emplace(packed(epilogue, normal(key)), kernel);
  return nullptr;
}
#else
const char* add(EpilogueId, const KernelKey&, const void*, std::size_t) {
  return "this build of epigemm is without CUDA";
}
#endif

// --- operands -------------------------------------------------------------------------------------------------------

template <class Compute>
Operands<Compute> by_slot(const EpilogueInfo& epilogue, const OperandValue* values) {
  Operands<Compute> operands{};
  int counts[kOperandKinds] = {};
  for (int i = 1; i < epilogue.operand_count; ++i) {  // the accumulator takes no slot
    const OperandKind kind = epilogue.operands[i].kind;
    const OperandValue& value = values[i - 1];
    const int number = counts[static_cast<int>(kind)]++;
    operands.data[first_slot(kind) + number] = value.data;
    if (kind == OperandKind::Scalar) operands.scalars[number] = static_cast<Compute>(value.value);
    if (kind == OperandKind::Matrix) operands.matrix_strides[number] = value.stride;
  }
  return operands;
}

template Operands<float> by_slot<float>(const EpilogueInfo&, const OperandValue*);
template Operands<double> by_slot<double>(const EpilogueInfo&, const OperandValue*);

Operands<float> operands_of(const Problem& problem) {
  return by_slot<float>(epilogue_info(problem.epilogue), problem.operands);
}

}  // namespace epigemm::link
