// From an epilogue's operand list to a CUTLASS epilogue visitor tree (EVT): one compute node over one load node per
// operand,
//   Sm90EVT<Sm90Compute<functor>, node(operand 0), node(operand 1), ...>.
#pragma once

#include <utility>

#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "epilogue/registry.h"

namespace epigemm::sm90 {

namespace fusion = cutlass::epilogue::fusion;

// CUTLASS computes on arrays, a functor on scalars: apply it element by element.
template <class Functor>
struct Lift {
  template <class T>
  struct Compute;

  template <class T, int Count>
  struct Compute<cutlass::Array<T, Count>> {
    template <class... Fragments>
    CUTLASS_DEVICE cutlass::Array<T, Count> operator()(Fragments const&... fragments) const {
      cutlass::Array<T, Count> result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Count; ++i) {
        result[i] = Functor::apply(T(fragments[i])...);
      }
      return result;
    }
  };
};

// The load node of one operand, and the arguments that it takes from a problem.
template <OperandKind Kind, class Element, class TileShape>
struct Node;

template <class Element, class TileShape>
struct Node<OperandKind::Accumulator, Element, TileShape> {
  using Type = fusion::Sm90AccFetch;
};

template <class Element, class TileShape>
struct Node<OperandKind::PerColumn, Element, TileShape> {
  using Type = fusion::Sm90RowBroadcast</*Stages=*/0, TileShape, Element, float>;

  static typename Type::Arguments arguments(OperandValue const& value) {
    return {
        /*ptr_row=*/static_cast<Element const*>(value.data),
        /*null_default=*/Element(0),
        /*dRow=*/{},
    };
  }
};

template <class Element, class TileShape>
struct Node<OperandKind::Scalar, Element, TileShape> {
  using Type = fusion::Sm90ScalarBroadcast<float>;

  static typename Type::Arguments arguments(OperandValue const& value) {
    return {
        /*scalars=*/{static_cast<float>(value.value)},
        /*scalar_ptrs=*/{static_cast<float const*>(value.data)},
        /*dScalar=*/{},
    };
  }
};

template <class Functor, class ElementInput, class ElementOutput, class TileShape>
struct EpilogueTree {
  template <std::size_t Index>
  using NodeOf =
      Node<Functor::operands[Index].kind,
           std::conditional_t<Functor::operands[Index].element == OperandElement::Input, ElementInput, float>,
           TileShape>;

  using Compute = fusion::Sm90Compute<Lift<Functor>::template Compute, ElementOutput, /*ElementCompute=*/float,
                                      cutlass::FloatRoundStyle::round_to_nearest>;

  template <std::size_t... Index>
  static auto make_type(std::index_sequence<Index...>) -> fusion::Sm90EVT<Compute, typename NodeOf<Index>::Type...>;

  using Operands = std::make_index_sequence<Functor::operands.size()>;
  using Type = decltype(make_type(Operands{}));

  static typename Type::Arguments arguments(OperandValue const* operands) { return arguments(operands, Operands{}); }

 private:
  template <std::size_t... Index>
  static typename Type::Arguments arguments(OperandValue const* operands, std::index_sequence<Index...>) {
    return {
        /*children=*/node_arguments<Index>(operands)...,
        /*compute node=*/{},
    };
  }

  template <std::size_t Index>
  static auto node_arguments(OperandValue const* operands) {
    if constexpr (Functor::operands[Index].kind == OperandKind::Accumulator) {
      return typename NodeOf<Index>::Type::Arguments{};
    } else {
      return NodeOf<Index>::arguments(operands[Index - 1]);  // the accumulator takes no slot
    }
  }
};

}  // namespace epigemm::sm90
