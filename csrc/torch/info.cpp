// epigemm::_build_info, _registry and _cuda_status: a description of this binary, as JSON.
#include <algorithm>

#include "epilogue/builtin.h"
#include "gemm/launch.h"
#include "gemm/planner/family.h"
#include "gemm/planner/measured.h"
#include "torch/arguments.h"

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#endif

namespace epigemm::binding {
namespace {

// The arithmetics that families may have, and the number of element types of each.
struct Multiplied {
  const char* name;
  Arithmetic arithmetic;
  ElementType element;
  int element_types;  // 0: of which no kernels are prelinked
  bool is_pair = false;
  bool reads_weight = false;
  bool is_quantised = false, is_in_blocks = false;  // results of 8 bits
  bool is_grouped = false;
  bool has_block_scales = false;  // of 8 bits
};
constexpr Multiplied kMultiplied[] = {
    {"16_bits", Arithmetic::IEEE, ElementType::BFloat16, 2},
    {"tf32", Arithmetic::TF32, ElementType::Float32, 1},
    {"split", Arithmetic::Split, ElementType::Float32, 1},
    {"scaled", Arithmetic::Scaled, ElementType::Float32, 1},
    {"split_as_it_lies", Arithmetic::Split, ElementType::Float32, 1, false, true},
    {"scaled_as_it_lies", Arithmetic::Scaled, ElementType::Float32, 1, false, true},
    {"pairs", Arithmetic::IEEE, ElementType::BFloat16, 2, true},
    {"groups", Arithmetic::IEEE, ElementType::BFloat16, 0, false, false, false, false, true},
    {"grouped_pairs", Arithmetic::IEEE, ElementType::BFloat16, 0, true, false, false, false, true},
    {"fast", Arithmetic::Fast, ElementType::Float8E4M3, 0},
    {"promoted", Arithmetic::Promoted, ElementType::Float8E4M3, 0},
    {"fast_to_e4m3", Arithmetic::Fast, ElementType::Float8E4M3, 0, false, false, true},
    {"promoted_to_e4m3", Arithmetic::Promoted, ElementType::Float8E4M3, 0, false, false, true},
    {"fast_to_blocks", Arithmetic::Fast, ElementType::Float8E4M3, 0, false, false, true, true},
    {"promoted_to_blocks", Arithmetic::Promoted, ElementType::Float8E4M3, 0, false, false, true, true},
    {"fast_pairs", Arithmetic::Fast, ElementType::Float8E4M3, 0, true},
    {"promoted_pairs", Arithmetic::Promoted, ElementType::Float8E4M3, 0, true},
    {"fast_pairs_to_e4m3", Arithmetic::Fast, ElementType::Float8E4M3, 0, true, false, true},
    {"promoted_pairs_to_e4m3", Arithmetic::Promoted, ElementType::Float8E4M3, 0, true, false, true},
    {"fast_pairs_to_blocks", Arithmetic::Fast, ElementType::Float8E4M3, 0, true, false, true, true},
    {"blocks", Arithmetic::Promoted, ElementType::Float8E4M3, 0, false, false, false, false, false, true},
    {"blocks_to_e4m3", Arithmetic::Promoted, ElementType::Float8E4M3, 0, false, false, true, false, false, true},
    {"blocks_to_blocks", Arithmetic::Promoted, ElementType::Float8E4M3, 0, false, false, true, true, false, true},
    {"blocks_pairs", Arithmetic::Promoted, ElementType::Float8E4M3, 0, true, false, false, false, false, true},
    {"blocks_pairs_to_e4m3", Arithmetic::Promoted, ElementType::Float8E4M3, 0, true, false, true, false, false, true}};

// How many tiles a family has for an arithmetic; -1 if it does not have the arithmetic. Those that read an fp32 weight
// as it lies are counted apart: they come behind those that read slices of it.
int tiles_of(const Family& family, const Multiplied& multiplied) {
  Problem problem;
  problem.arithmetic = multiplied.arithmetic;
  problem.is_pair = multiplied.is_pair;
  problem.x.element = problem.weight.element = multiplied.element;
  const bool is_wide = is_8_bits(multiplied.element) && !multiplied.is_quantised;
  problem.out.element = is_wide ? ElementType::BFloat16 : multiplied.element;
  problem.out_scale.is_of_blocks = multiplied.is_in_blocks;
  problem.groups.count = multiplied.is_grouped;
  problem.x_scale.is_of_blocks = multiplied.has_block_scales;
  if (!family.computes(problem) || (multiplied.is_grouped && !family.takes_groups())) return -1;
  const int on_slices = family.tile_count(problem);
  if (!multiplied.reads_weight) return on_slices;
  problem.is_weight_readable = true;
  return family.tile_count(problem) - on_slices > 0 ? family.tile_count(problem) - on_slices : -1;
}

// The number of GEMM kernels of one epilogue that the package has. Kernels of pairs are not counted: they are for few
// epilogues.
int gemm_kernels() {
  constexpr int kOrders = 2;  // of a weight that is read as it lies
  int count = 0;
  for (int id = 0; has_gemm_kernels() && id < kFamilyCount; ++id) {
    if (!family_of(static_cast<FamilyId>(id)).is_prelinked()) continue;
    for (const Multiplied& multiplied : kMultiplied) {
      if (multiplied.is_pair) continue;
      const int each = multiplied.reads_weight ? kOrders : multiplied.element_types;
      count += each * std::max(0, tiles_of(family_of(static_cast<FamilyId>(id)), multiplied));
    }
  }
  return count;
}

// {arithmetic: number of tiles} of a family.
void write_family(std::ostream& json, FamilyId id) {
  const Family& family = family_of(id);
  json << (id == static_cast<FamilyId>(0) ? "" : ", ") << "\"" << family_name(id) << "\": {";
  bool is_first = true;
  for (const Multiplied& multiplied : kMultiplied) {
    const int tiles = tiles_of(family, multiplied);
    if (tiles < 0) continue;
    json << (is_first ? "" : ", ") << "\"" << multiplied.name << "\": " << tiles;
    is_first = false;
  }
  json << "}";
}

std::string build_info() {
  std::ostringstream json;
  json << "{\"version\": \"" << EPIGEMM_VERSION << "\", \"cuda\": " << (EPIGEMM_WITH_CUDA ? "true" : "false")
       << ", \"cuda_toolkit\": \"" << EPIGEMM_CUDA_TOOLKIT << "\", \"cutlass\": \"" << EPIGEMM_CUTLASS_VERSION
       << "\", \"torch_headers\": \"" << EPIGEMM_TORCH_HEADERS << "\", \"torch_floor\": \"2.10\""
       << ", \"elementwise_architectures\": \"" << EPIGEMM_ELEMENTWISE_ARCHITECTURES << "\", \"gemm_architectures\": \""
       << EPIGEMM_GEMM_ARCHITECTURES << "\", \"compiler\": \"" << EPIGEMM_COMPILER
       << "\", \"gemm_kernels\": " << gemm_kernels() << ", \"tiles_fingerprint\": \"" << measured::tiles_fingerprint()
       << "\", \"families\": {";
  for (int id = 0; id < kFamilyCount; ++id) write_family(json, static_cast<FamilyId>(id));
  json << "}}";
  return json.str();
}

void write_epilogue(std::ostream& json, const EpilogueInfo& epilogue) {
  json << "{\"name\": \"" << epilogue.name << "\", \"functor\": \"" << epilogue.functor
       << "\", \"linear\": " << (epilogue.linear ? "true" : "false")
       << ", \"elementwise\": true, \"operands\": [{\"kind\": \"accumulator\"}";
  for (int i = 1; i < epilogue.operand_count; ++i) {
    const Operand& operand = epilogue.operands[i];
    json << ", {\"kind\": \"" << traits_of(operand.kind).name << "\", \"name\": \"" << operand.name
         << "\", \"element\": \"" << (operand.element == OperandElement::Input ? "input" : "compute") << "\"}";
  }
  json << "]}";
}

std::string registry() {
  std::ostringstream json;
  json << "[";
  for (int i = 0; i < kEpilogueCount; ++i) {
    if (i) json << ", ";
    write_epilogue(json, epilogues()[i]);
  }
  json << "]";
  return json.str();
}

std::string cuda_status(int64_t device) {
#if EPIGEMM_WITH_CUDA
  return cuda::status(static_cast<int>(device));
#else
  (void)device;
  return "epigemm was built without CUDA";
#endif
}

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_build_info", TORCH_BOX(&epigemm::binding::build_info));
  m.impl("_registry", TORCH_BOX(&epigemm::binding::registry));
  m.impl("_cuda_status", TORCH_BOX(&epigemm::binding::cuda_status));
}
