// What an epilogue may read, one declaration per operand. See docs/epilogues.md.
//
// A functor lists its operands in the order in which `apply` takes them:
//
//   static constexpr auto operands = operand_list(accumulator(), per_column("bias"), scalar("scale"));
//
// From that one list the elementwise CUDA kernel derives its loads, and the torch binding its argument checks.
#pragma once

#if defined(__CUDACC__)
#define EPIGEMM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define EPIGEMM_HOST_DEVICE inline
#endif

namespace epigemm {

enum class OperandKind {
  Accumulator,  // the product of one output element (linear) or x itself (elementwise)
  PerColumn,    // a vector of length N, broadcast along M; absent = zeros
  Scalar,       // one number, by value or read on the device from a 0-d tensor
  PerRow,       // a vector of length M, broadcast along N
  Matrix,       // one value per element of the result
};

// What a kind is broadcast along, and how many operands of it an epilogue may read.
struct KindTraits {
  const char* name;
  bool by_row, by_column;  // whether each row of the result has its own, and each column
  int most;
};

constexpr int kOperandKinds = 5;

EPIGEMM_HOST_DEVICE constexpr KindTraits traits_of(OperandKind kind) {
  constexpr KindTraits kinds[kOperandKinds] = {
      {"accumulator", true, true, 1}, {"per_column", false, true, 4}, {"scalar", false, false, 4},
      {"per_row", true, false, 2},    {"matrix", true, true, 2},
  };
  return kinds[static_cast<int>(kind)];
}

enum class OperandElement {
  Input,    // the element type of x
  Compute,  // the type of the epilogue's arithmetic: fp32, for fp64 tensors fp64
};

struct Operand {
  OperandKind kind;
  OperandElement element;
  const char* name;
  bool shares_rows = false;  // Matrix: several consecutive rows of the result read one row of it
};

EPIGEMM_HOST_DEVICE constexpr Operand accumulator() {
  return {OperandKind::Accumulator, OperandElement::Compute, "accumulator"};
}
EPIGEMM_HOST_DEVICE constexpr Operand per_column(const char* name) {
  return {OperandKind::PerColumn, OperandElement::Input, name};
}
// For vectors that were folded from others: rounding them to 16 bits again would cost accuracy for nothing.
EPIGEMM_HOST_DEVICE constexpr Operand folded_per_column(const char* name) {
  return {OperandKind::PerColumn, OperandElement::Compute, name};
}
EPIGEMM_HOST_DEVICE constexpr Operand scalar(const char* name) {
  return {OperandKind::Scalar, OperandElement::Compute, name};
}

// A functor's operands. No std::array: NVRTC has no C++ library.
template <int Count>
struct OperandList {
  Operand operands[Count];

  EPIGEMM_HOST_DEVICE static constexpr int size() { return Count; }
  EPIGEMM_HOST_DEVICE constexpr const Operand& operator[](int i) const { return operands[i]; }
  EPIGEMM_HOST_DEVICE constexpr const Operand* data() const { return operands; }
};

template <class... Operands>
EPIGEMM_HOST_DEVICE constexpr OperandList<sizeof...(Operands)> operand_list(Operands... operands) {
  return {{operands...}};
}

template <class Functor>
EPIGEMM_HOST_DEVICE constexpr bool reads(OperandKind kind) {
  for (int i = 1; i < Functor::operands.size(); ++i) {
    if (Functor::operands[i].kind == kind) return true;
  }
  return false;
}

}  // namespace epigemm
