#include "gemm/sm90_tma/kernel_names.h"

#include "gemm/sm90/architecture.h"
#include "gemm/sm90/kernel_names.h"
#include "gemm/sm90_tma/tiles.h"

namespace epigemm::sm90_tma {
namespace {

constexpr int kTmaAlignment = Sm90::kTmaAlignment;

int first_matrix(const EpilogueInfo& epilogue) {
  for (int i = 1; i < epilogue.operand_count; ++i) {
    if (epilogue.operands[i].kind == OperandKind::Matrix) return i;
  }
  return 0;
}

}  // namespace

bool has_matrix_by_tma(const Problem& problem) {
  const EpilogueInfo& epilogue = epilogue_info(problem.epilogue);
  const int index = first_matrix(epilogue);
  if (!index) return false;
  const bool is_of_element =
      epilogue.operands[index].element == OperandElement::Input || problem.x.element == ElementType::Float32;
  const OperandValue& matrix = problem.operands[index - 1];
  return is_of_element && matrix.data && reinterpret_cast<uintptr_t>(matrix.data) % kTmaAlignment == 0 &&
         matrix.stride >= problem.n && matrix.stride * element_bytes(problem.x.element) % kTmaAlignment == 0;
}

bool reads_matrix(const EpilogueInfo& epilogue) { return first_matrix(epilogue) > 0; }

open::KernelName kernel_name(ElementType element, int tile, bool has_matrix_by_tma) {
  static const sm90::TileNames names("sm90_tma", kTileCount), with_matrix("sm90_tma", kTileCount, "_matrix");
  return (has_matrix_by_tma ? with_matrix : names).of(element, tile);
}

}  // namespace epigemm::sm90_tma
