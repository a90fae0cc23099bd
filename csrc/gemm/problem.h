// What travels from the binding to the kernels: plain structs, no tensor, no CUTLASS type.
#pragma once

#include <cstdint>

#include "epilogue/registry.h"

namespace epigemm {

enum class ElementType { Float16, BFloat16, Float32, Float64 };

constexpr int element_bytes(ElementType element) {
  return element == ElementType::Float64 ? 8 : element == ElementType::Float32 ? 4 : 2;
}

constexpr const char* element_name(ElementType element) {
  constexpr const char* names[] = {"float16", "bfloat16", "float32", "float64"};
  return names[static_cast<int>(element)];
}

// What fp32 operands are multiplied in; without meaning for the other element types.
enum class Arithmetic {
  IEEE,    // every product and sum in fp32
  TF32,    // products of 10-bit mantissas on the tensor cores, sums in fp32
  Split,   // three products of two fp16 pieces: fp32's accuracy (gemm/split)
  Scaled,  // one product of fp16 pieces, every row scaled to fp16's range: TF32's mantissas at twice its rate
};

// A row-major matrix: columns are adjacent.
struct Matrix {
  void* data = nullptr;
  int64_t row_stride = 0;  // elements
};

// D = epilogue(x @ weight^T): x is M x K, weight N x K, out (D) M x N.
struct Problem {
  EpilogueId epilogue = EpilogueId::bias;
  ElementType element = ElementType::Float16;
  Arithmetic arithmetic = Arithmetic::IEEE;
  int64_t m = 0, n = 0, k = 0;
  Matrix x, weight, out;
  OperandValue operands[kMaxOperands];  // in the epilogue's order, the accumulator left out
  int capability = 0;                   // 90 = sm_90; 0 = not a CUDA device
  int multiprocessors = 0;
  int device = 0;
  void* stream = nullptr;  // cudaStream_t
};

// The order in which a persistent kernel walks the grid of output tiles.
enum class Raster { AlongM = 0, AlongN = 1 };

// Which kernel runs a problem, and how.
struct Plan {
  int tile = 0;  // index into the tiles of the problem's arithmetic
  Raster raster = Raster::AlongM;
  int swizzle = 1;  // width of the strips of tiles that are walked together, in clusters
  int splits = 1;   // CTAs that share the K of one tile
};

}  // namespace epigemm
