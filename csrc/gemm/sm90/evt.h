// From an epilogue's operand list to a CUTLASS epilogue visitor tree (EVT): one compute node over one load node per
// operand,
//   Sm90EVT<Sm90Compute<functor>, node(operand 0), node(operand 1), ...>.
//
// A kernel may compute the transpose of D (its rows are D's columns): then a vector along D's columns is broadcast
// along the kernel's rows.
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

// What the functor's accumulator is: here the mainloop's sums as they are.
struct PlainAccumulator {
  using Type = fusion::Sm90AccFetch;
};

template <class Element, class TileShape, bool Transposed>
using VectorAlongColumns =
    std::conditional_t<Transposed, fusion::Sm90ColBroadcast</*Stages=*/0, TileShape, Element, float>,
                       fusion::Sm90RowBroadcast</*Stages=*/0, TileShape, Element, float>>;

// The load node of one operand, and the arguments that it takes from a problem.
template <OperandKind Kind, class Element, class TileShape, bool Transposed>
struct Node;

template <class Element, class TileShape, bool Transposed>
struct Node<OperandKind::PerColumn, Element, TileShape, Transposed> {
  using Type = VectorAlongColumns<Element, TileShape, Transposed>;

  static typename Type::Arguments arguments(OperandValue const& value) {
    return {
        /*ptr=*/static_cast<Element const*>(value.data),
        /*null_default=*/Element(0),
        /*stride=*/{},
    };
  }
};

template <class Element, class TileShape, bool Transposed>
struct Node<OperandKind::Scalar, Element, TileShape, Transposed> {
  using Type = fusion::Sm90ScalarBroadcast<float>;

  static typename Type::Arguments arguments(OperandValue const& value) {
    return {
        /*scalars=*/{static_cast<float>(value.value)},
        /*scalar_ptrs=*/{static_cast<float const*>(value.data)},
        /*dScalar=*/{},
    };
  }
};

template <class Functor, class ElementInput, class ElementOutput, class TileShape, bool Transposed = false,
          class Accumulator = PlainAccumulator>
struct EpilogueTree {
  template <std::size_t Index>
  using ElementOf = std::conditional_t<Functor::operands[Index].element == OperandElement::Input, ElementInput, float>;

  template <std::size_t Index>
  static constexpr bool is_accumulator = Functor::operands[Index].kind == OperandKind::Accumulator;

  template <std::size_t Index>
  static auto make_node() {
    if constexpr (is_accumulator<Index>) {
      return Accumulator{};
    } else {
      return Node<Functor::operands[Index].kind, ElementOf<Index>, TileShape, Transposed>{};
    }
  }
  template <std::size_t Index>
  using NodeOf = decltype(make_node<Index>());

  using Compute = fusion::Sm90Compute<Lift<Functor>::template Compute, ElementOutput, /*ElementCompute=*/float,
                                      cutlass::FloatRoundStyle::round_to_nearest>;

  template <std::size_t... Index>
  static auto make_type(std::index_sequence<Index...>) -> fusion::Sm90EVT<Compute, typename NodeOf<Index>::Type...>;

  using Operands = std::make_index_sequence<Functor::operands.size()>;
  using Type = decltype(make_type(Operands{}));
  using AccumulatorArguments = typename Accumulator::Type::Arguments;

  static typename Type::Arguments arguments(OperandValue const* operands,
                                            AccumulatorArguments const& accumulator = {}) {
    return arguments(operands, accumulator, Operands{});
  }

 private:
  template <std::size_t... Index>
  static typename Type::Arguments arguments(OperandValue const* operands, AccumulatorArguments const& accumulator,
                                            std::index_sequence<Index...>) {
    return {
        /*children=*/node_arguments<Index>(operands, accumulator)...,
        /*compute node=*/{},
    };
  }

  template <std::size_t Index>
  static auto node_arguments(OperandValue const* operands, AccumulatorArguments const& accumulator) {
    if constexpr (is_accumulator<Index>) {
      return accumulator;
    } else {
      return NodeOf<Index>::arguments(operands[Index - 1]);  // the accumulator takes no slot
    }
  }
};

}  // namespace epigemm::sm90
