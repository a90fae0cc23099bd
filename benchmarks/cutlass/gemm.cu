// CUTLASS 2.x's device GEMM at the tiles of csrc/gemm/sm80_mma/tiles.h: D = x W^T with fp32 sums, without an epilogue,
// of bf16, or of fp32 as TF32. A function for each tile: x [M, K], weight [N, K] and out [M, N] are contiguous, K and N
// multiples of 16 bytes. Returns 0, or the number of a cutlass::Status.
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/device/gemm.h"

namespace {

using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
constexpr int kVectorBytes = 16, kSwizzle = 8;

// How an element is stored, and the instruction.
struct bf16 {
  using Element = cutlass::bfloat16_t;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
};
struct tf32 {
  using Element = float;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 8>;
};

template <class Type, class Tile, class Warp, int kStages>
int run(int m, int n, int k, const void* x, const void* weight, void* out, void* stream) {
  using Element = typename Type::Element;
  using Epilogue = cutlass::epilogue::thread::LinearCombination<Element, kVectorBytes / sizeof(Element), float, float,
                                                                cutlass::epilogue::thread::ScaleType::Nothing>;
  using Gemm =
      cutlass::gemm::device::Gemm<Element, Row, Element, Column, Element, Row, float, cutlass::arch::OpClassTensorOp,
                                  cutlass::arch::Sm80, Tile, Warp, typename Type::Instruction, Epilogue,
                                  cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<kSwizzle>, kStages>;
  const cutlass::TensorRef<Element, Row> result(static_cast<Element*>(out), Row(n));
  const typename Gemm::Arguments arguments({m, n, k}, {static_cast<const Element*>(x), Row(k)},
                                           {static_cast<const Element*>(weight), Column(k)}, result, result, {});
  if (const cutlass::Status status = Gemm::can_implement(arguments); status != cutlass::Status::kSuccess) {
    return static_cast<int>(status);
  }
  Gemm gemm;
  return static_cast<int>(gemm(arguments, nullptr, static_cast<cudaStream_t>(stream)));
}

}  // namespace

// Rows, columns and K of a stage; stages; rows and columns of a warp.
#define GEMM(TYPE, M, N, K, STAGES, WARP_M, WARP_N)                                                               \
  extern "C" int gemm_##TYPE##_##M##x##N##x##K(int m, int n, int k, const void* x, const void* weight, void* out, \
                                               void* stream) {                                                    \
    using Tile = cutlass::gemm::GemmShape<M, N, K>;                                                               \
    using Warp = cutlass::gemm::GemmShape<WARP_M, WARP_N, K>;                                                     \
    return run<TYPE, Tile, Warp, STAGES>(m, n, k, x, weight, out, stream);                                        \
  }

GEMM(bf16, 128, 256, 64, 3, 64, 64)
GEMM(bf16, 256, 128, 64, 3, 64, 64)
GEMM(bf16, 128, 256, 32, 4, 64, 64)
GEMM(bf16, 256, 128, 32, 4, 64, 64)
GEMM(bf16, 128, 128, 32, 3, 64, 64)
GEMM(bf16, 64, 128, 32, 4, 32, 64)
GEMM(bf16, 64, 64, 64, 3, 32, 32)
GEMM(tf32, 128, 256, 16, 4, 64, 64)
GEMM(tf32, 128, 128, 16, 3, 64, 64)
GEMM(tf32, 64, 64, 32, 3, 32, 32)
