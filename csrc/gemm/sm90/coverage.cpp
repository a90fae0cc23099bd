#include "gemm/sm90/coverage.h"

#include <algorithm>

#include "gemm/grid.h"
#include "gemm/sm90/architecture.h"
#include "gemm/sm90/tile.h"
#include "gemm/text.h"

namespace epigemm::sm90 {
namespace {

constexpr int kTmaAlignment = Sm90::kTmaAlignment;

std::string misaligned_row(const char* argument, const Matrix& matrix) {
  return text(argument, " has a row stride of ", matrix.row_stride, " elements (",
              matrix.row_stride * element_bytes(matrix.element), " bytes); fused kernels need a multiple of ",
              kTmaAlignment, " bytes");
}

std::string misaligned_length(const char* extent, int64_t length, int bytes) {
  return text(extent, " = ", length, " elements are ", length * bytes,
              " bytes; fused kernels need rows of a multiple of ", kTmaAlignment, " bytes");
}

// Kernels of groups read weights in either order.
bool is_weight_across(const Problem& p) { return p.groups && p.is_weight_transposed; }

bool fits(int64_t elements, const Matrix& matrix) {
  return elements * element_bytes(matrix.element) % kTmaAlignment == 0;
}

}  // namespace

std::string why_not_on(const Device& device) {
  if (Sm90::is_of(device)) return std::string();
  return text("fused kernels exist for compute capability 9.0 (Hopper); this device has ", device.capability / 10, ".",
              device.capability % 10);
}

std::string why_not_matrices(const Problem& p) {
  if (p.batch != 1) return kOneProduct;
  if (p.m > kLargestExtent || p.n > kLargestExtent || p.k > kLargestExtent) {
    return text("M, N and K must be at most ", kLargestExtent);
  }
  const bool is_across = is_weight_across(p);
  if (p.x.column_stride != 1 || (p.weight.column_stride != 1 && !is_across) || p.out.column_stride != 1) {
    return "x, weight or out is not row-major";
  }
  if (p.x.row_stride < p.k || (is_across ? p.weight.column_stride < p.n : p.weight.row_stride < p.k)) {
    return text("the rows of ", p.x.row_stride < p.k ? "x" : "weight", " overlap (an expanded tensor)");
  }
  if (p.groups.count > 1 && !is_across && p.groups.weight_stride % p.weight.row_stride != 0) {
    return text("the weights of two groups are ", p.groups.weight_stride,
                " elements apart, which is not a multiple of ", "their row stride, ", p.weight.row_stride);
  }
  const bool are_stacked = p.groups.count > 1 && !is_across;
  const int64_t rows_apart = are_stacked ? std::max(p.n, p.groups.weight_stride / p.weight.row_stride) : p.n;
  if (p.groups && p.groups.count * rows_apart > kLargestExtent) {
    return text("all groups' weights together must have at most ", kLargestExtent, " rows");
  }
  if (p.groups && p.m > kGroupedRows) return text("rows in groups must be at most ", kGroupedRows);
  if (!p.are_operands_contiguous) return "a per-column operand is not contiguous";
  return std::string();
}

std::string why_not_whole_vectors(const Problem& p) {
  if (p.alignment < kTmaAlignment) {
    return text("x, weight or out starts at an address aligned to ", p.alignment, " bytes; fused kernels need ",
                kTmaAlignment);
  }
  if (!fits(p.k, p.x)) return misaligned_length("K", p.k, element_bytes(p.x.element));
  if (!p.is_out_padded && !fits(p.n, p.out)) return misaligned_length("N", p.n, element_bytes(p.out.element));
  if (!fits(p.x.row_stride, p.x)) return misaligned_row("x", p.x);
  if (is_weight_across(p)) {
    const bool are_apart = p.groups.count == 1 || p.groups.weight_stride != 0;
    if (!are_apart || !fits(p.weight.column_stride | p.groups.weight_stride, p.weight)) {
      return text("the transposed weight's columns, or its groups, are not apart by a multiple of ", kTmaAlignment,
                  " bytes");
    }
  } else if (!fits(p.weight.row_stride, p.weight)) {
    return misaligned_row("weight", p.weight);
  }
  if (!fits(p.out.row_stride, p.out)) return misaligned_row("out", p.out);
  return std::string();
}

std::string why_not_addressable(const Problem& p) {
  std::string reason = why_not_matrices(p);
  return reason.empty() ? why_not_whole_vectors(p) : reason;
}

bool multiplies_as_stored(const Problem& p) {
  if (p.weight.element != p.x.element || p.out.element != p.x.element) return false;
  switch (p.x.element) {
    case ElementType::Float16:
    case ElementType::BFloat16:
      return true;
    case ElementType::Float32:
      return p.arithmetic == Arithmetic::TF32;
    default:
      return false;
  }
}

Matrix matrix_by_tma(const Problem& p) {
  const EpilogueInfo& epilogue = epilogue_info(p.epilogue);
  if (is_8_bits(p.out.element)) return {};  // the matrix has 16 bits
  for (int i = p.is_pair ? first_matrix(epilogue) + 1 : 1; i < epilogue.operand_count; ++i) {
    if (epilogue.operands[i].kind != OperandKind::Matrix || epilogue.operands[i].shares_rows) continue;
    const bool is_of_results =
        epilogue.operands[i].element == OperandElement::Input || p.out.element == ElementType::Float32;
    const OperandValue& value = p.operands[i - 1];
    const Matrix matrix{const_cast<void*>(value.data), p.out.element, value.stride};
    const bool is_loadable = is_of_results && reinterpret_cast<uintptr_t>(value.data) % kTmaAlignment == 0 &&
                             value.stride >= p.n && fits(value.stride, matrix);
    return is_loadable ? matrix : Matrix{};
  }
  return {};
}

std::string why_sums_are_too_long(const Problem& p, int splits) {
  constexpr int64_t kLongTF32Sum = 12288, kMostTF32Products = 4096;
  if (p.x.element != ElementType::Float32 || p.k <= kLongTF32Sum || ceil_div(p.k, splits) <= kMostTF32Products) {
    return std::string();
  }
  return text("K = ", p.k, " is above ", kLongTF32Sum,
              ", from where on cuBLAS splits K: a TF32 kernel that does not is less accurate than cuBLAS");
}

}  // namespace epigemm::sm90
