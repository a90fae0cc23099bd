// The epilogue of kernels on Hopper whose functor is linked in at run time (csrc/open/contract.h): a warpgroup takes
// its sums through the functor, and a helper warp does all that is not arithmetic.
//
// A warpgroup's part of a tile goes through shared memory in passes of 64 rows, several at once. For each pass the
// helper makes a slot ready, with the part of a matrix in it that TMA can bring; the warpgroup puts the results there,
// in the matrix's place; the helper stores them by TMA. Vectors and scalars wait in shared memory as fp32: the helper
// brings those of a tile when the tile before it is on its way. So the warpgroup waits for nothing but its slots, and
// its mainloop hides what the helper does.
//
// If the functor has a second value for each element (csrc/open/contract.h), each pass is followed by another one, of
// that value, which the helper stores in a second matrix. Both values are computed from the sums and the operands, so
// what they share is computed twice. In return a pass needs one slot, whatever it stores.
//
// Results of 8 bits (quantise.cuh) are rounded from fp32. Where each row of a tile has a scale, they are first rounded
// to bf16, as results of that type are, and a pass has all columns of the tile.
//
// Rows and columns are the kernel's. Where it computes the transpose of D, D's columns are its rows: vectors change
// places, and stmatrix turns what is written to a slot.
#pragma once

#include "cute/arch/copy_sm75.hpp"
#include "cute/arch/copy_sm90.hpp"
#include "cutlass/array.h"
#include "cutlass/numeric_conversion.h"
#include "gemm/sm90/epilogue_helper.cuh"
#include "gemm/sm90/epilogue_moments.cuh"
#include "open/epilogue.cuh"

namespace epigemm::sm90 {

// One thread's part of the epilogue. It has two of every 64 rows, eight apart (index r), and two neighbours (index c)
// of every eight columns (index j).
template <class C>
struct EpilogueConsumer {
  using Operand = typename C::Operand;
  using Output = typename C::Output;
  using Filled = typename EpilogueMoments<C>::Filled;
  static constexpr bool kIsNarrow = sizeof(Output) == 2;
  // A matrix by TMA lies where results will.
  static constexpr bool kTakesMatrix = sizeof(Operand) == sizeof(Output);
  static constexpr int kEights = C::kPassColumns / 8;  // of columns, in a pass
  // How many of them are computed at once: 192 sums leave few registers.
  static constexpr int kChunk = kIsNarrow ? (kEights % 4 == 0 ? 4 : 2) : (kEights % 2 == 0 ? 2 : 1);
  static_assert(kEights % kChunk == 0 && (kTakesMatrix || C::kIsQuantised));
  // What a word has while results of a chunk are computed: two columns in 16 bits, or two rows, too, in 8 bits.
  static constexpr bool kHasWholeWords = C::kIsQuantised && !C::kIsInBlocks;
  static constexpr int kWords = kChunk * (kHasWholeWords ? 1 : 2);

  typename C::Params const& params;
  typename C::Shared& shared;
  const int group, warp, lane;
  const EpilogueLayout<C> layout{};
  const float out_scale = read_out_scale();  // of all results, if they have one

  template <class Sums>
  CUTLASS_DEVICE void finish(SlotRing& ring, Sums const& sums, Place tile) const {
    if (layout.hands_over) Handover::of_operands(group).wait();
    Filled previous{};
    CUTLASS_PRAGMA_UNROLL
    for (int pass = 0; pass < C::kPasses; ++pass) {
      const int m = pass / C::kPassesOfRow, n = pass % C::kPassesOfRow;
      const Place place{tile.row + m * C::kRowStep, tile.column + n * C::kPassColumns};
      const Filled filled{cute::cast_smem_ptr_to_uint(layout.slot(shared, group, ring.slot)), place};
      run_pass<open::Result>(ring, sums, m, n, place);
      if (C::has_store()) run_pass<open::Stored>(ring, sums, m, n, place);
      if constexpr (C::kReduces) {
        if (params.column_moments && reduces_pairs()) reduce_pair(pass, previous, filled);
      }
      previous = filled;
    }
    if (layout.hands_over) Handover::of_room(group).arrive();
  }

 private:
  CUTLASS_DEVICE float read_out_scale() const {
    if constexpr (kHasWholeWords) {
      // Volatile, because the kernel ahead may write it: it is not read before that one is waited for.
      OutScale const& scale = params.out_scale;
      if (scale.data) return *static_cast<const volatile float*>(scale.data);
      return scale.value;  // a conditional expression of both would be volatile, and read a parameter as memory
    }
    return 1;
  }

  // Whether slots are reduced two by two: they must stay as they are until both are. Nothing but this warpgroup may
  // write them, not TMA with the next passes' matrix. The last one of an odd number of passes is reduced alone; the
  // warps must meet before its slot is written, which they do behind the next tile's first two passes.
  CUTLASS_DEVICE bool reduces_pairs() const {
    const bool has_matrix =
        epigemm_operand(open::kMatrix0 + C::matrix_by_tma()) != open::kUnread && params.is_matrix_by_tma;
    const int least = C::kPasses % 2 == 0 ? 2 : 3;
    return layout.slots >= least && !has_matrix && !C::has_store();
  }

  CUTLASS_DEVICE void reduce_pair(int pass, Filled previous, Filled filled) const {
    if (pass % 2 == 1) {
      EpilogueMoments<C>::reduce(params, group, previous, filled, layout.slots);
    } else if (pass == C::kPasses - 1) {
      EpilogueMoments<C>::reduce(params, group, filled, layout.slots);
    }
  }

  // `Value`: of the functor, open::Result or open::Stored.
  template <class Value, class Sums>
  CUTLASS_DEVICE void run_pass(SlotRing& ring, Sums const& sums, int m, int n, Place place) const {
    wait_for(shared.ready[group][ring.slot], ring.phase);
    char* const slot = layout.slot(shared, group, ring.slot);
    finish_pass<Value>(sums, m, n, place, slot);
    if constexpr (C::kReduces && std::is_same_v<Value, open::Result>) {
      if (params.column_moments && !reduces_pairs()) {
        const Filled filled{cute::cast_smem_ptr_to_uint(slot), place};
        EpilogueMoments<C>::reduce(params, group, filled, layout.slots);
      }
    }
    asm volatile("" ::: "memory");  // writes are not moved behind the fence
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (lane == 0) shared.written[group][ring.slot].arrive();
    ring.advance(layout.slots);
  }

  // --- a slot ------------------------------------------------------------------------------------------------------

  // The address of 16 bytes of a row of D, swizzled as by TMA.
  CUTLASS_DEVICE static char* place_in(char* slab, int row, int chunk) {
    return slab + row * C::kRowBytes + swizzled<C::kRowBytes>(row, chunk) * 16;
  }

  // 16 bits: the address of this lane's row of four 8 x 8 matrices, from column 8 j on.
  CUTLASS_DEVICE cute::uint128_t& matrix_row(char* slot, int j) const {
    char* const at = C::kTransposed ? place_in(slot, (j + lane / 16) * 8 + lane % 8, warp * 2 + lane / 8 % 2)
                                    : place_in(slot, warp * 16 + lane % 16, lane / 16 + j);
    return *reinterpret_cast<cute::uint128_t*>(at);
  }

  // 32 bits: the address of a number. The next column's number follows it, except in the transpose.
  CUTLASS_DEVICE float* number(char* slot, int j, int r, int c) const {
    const int row = warp * 16 + lane / 4 + r * 8, column = j * 8 + lane % 4 * 2 + c;
    if constexpr (C::kTransposed) {
      return reinterpret_cast<float*>(place_in(slot + row / 32 * C::kSlabBytes, column, row % 32 / 4)) + row % 4;
    } else {
      return reinterpret_cast<float*>(place_in(slot, row, column / 4)) + column % 4;
    }
  }

  // --- matrices: words as they lie in memory, two numbers of 16 bits in one --------------------------------------

  struct Matrix {
    uint32_t words[kChunk * 4];  // [j][r][c], or [j][r] of 16 bits
    bool is_float;

    CUTLASS_DEVICE float at(int j, int r, int c) const {
      if constexpr (sizeof(Operand) == 2) {
        if (!is_float) return WordNumbers<Operand>::at(words[j * 2 + r], c);
      }
      return __uint_as_float(words[(j * 2 + r) * 2 + c]);
    }

    template <class T>
    CUTLASS_DEVICE void keep(int j, int r, T low, T high) {
      if constexpr (sizeof(T) == 2) {
        words[j * 2 + r] = low.storage | static_cast<uint32_t>(high.storage) << 16;
      } else {
        words[(j * 2 + r) * 2] = __float_as_uint(low);
        words[(j * 2 + r) * 2 + 1] = __float_as_uint(high);
      }
    }
  };

  CUTLASS_DEVICE void take_from_slot(Matrix& to, char* slot, int first) const {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kChunk; ++j) {
      uint32_t* const words = &to.words[j * 2];
      if constexpr (!kIsNarrow) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          to.template keep<float>(j, r, *number(slot, first + j, r, 0), *number(slot, first + j, r, 1));
        }
      } else if (j % 2 == 0) {
        using Load = std::conditional_t<C::kTransposed, cute::SM75_U16x8_LDSM_T, cute::SM75_U32x4_LDSM_N>;
        Load::copy(matrix_row(slot, first + j), words[0], words[1], words[2], words[3]);
      }
    }
  }

  // Read from device memory if TMA does not load the matrix: in pairs if pairs are along rows of the matrix.
  template <class T>
  CUTLASS_DEVICE void load(Matrix& to, int i, Place place) const {
    const bool shares_rows = epigemm_shares_rows(open::kMatrix0 + i);
    if (C::kTransposed && shares_rows) return load_shared_rows<T>(to, i, place);
    auto* const data = static_cast<T const*>(params.operands.data[open::kMatrix0 + i]);
    const int64_t stride = params.operands.matrix_strides[i];
    const int64_t down = C::kTransposed ? 1 : stride, right = C::kTransposed ? stride : 1;
    const uint64_t odd =
        (reinterpret_cast<uint64_t>(data) | static_cast<uint64_t>(stride) * sizeof(T)) % (2 * sizeof(T));
    const bool has_pairs = !C::kTransposed && odd == 0 && params.columns % 2 == 0;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = place.row + warp * 16 + lane / 4 + r * 8, first = place.column + lane % 4 * 2;
      const int64_t of_matrix = shares_rows ? params.operands.shared_rows[i].of(row) : row;
      T const* const from = data + of_matrix * down + first * right;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kChunk; ++j) {
        const bool has_low = row < params.rows && first + j * 8 < params.columns;
        const bool has_high = row < params.rows && first + j * 8 + 1 < params.columns;
        cutlass::AlignedArray<T, 2> numbers;
        numbers[0] = numbers[1] = T(0);
        if (has_pairs) {
          if (has_low) numbers = *reinterpret_cast<cutlass::AlignedArray<T, 2> const*>(from + j * 8);
        } else {
          if (has_low) numbers[0] = from[j * 8 * right];
          if (has_high) numbers[1] = from[(j * 8 + 1) * right];
        }
        to.template keep<T>(j, r, numbers[0], numbers[1]);
      }
    }
  }

  // The same in the transpose, where D's rows are the kernel's columns.
  template <class T>
  CUTLASS_DEVICE void load_shared_rows(Matrix& to, int i, Place place) const {
    auto* const data = static_cast<T const*>(params.operands.data[open::kMatrix0 + i]);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kChunk; ++j) {
      const int column = place.column + lane % 4 * 2 + j * 8;
      T const* from[2];
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < 2; ++c) {
        from[c] = data + params.operands.shared_rows[i].of(column + c) * params.operands.matrix_strides[i];
      }
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = place.row + warp * 16 + lane / 4 + r * 8;
        const bool is_inside = row < params.rows;
        const T low = is_inside && column < params.columns ? from[0][row] : T(0);
        const T high = is_inside && column + 1 < params.columns ? from[1][row] : T(0);
        to.template keep<T>(j, r, low, high);
      }
    }
  }

  CUTLASS_DEVICE void take_matrix(Matrix& to, int i, Place place, char* slot, int first) const {
    const int kind = epigemm_operand(open::kMatrix0 + i);
    CUTLASS_PRAGMA_UNROLL
    for (uint32_t& word : to.words) word = 0;
    to.is_float = sizeof(Operand) == sizeof(float) || kind == open::kOfCompute;
    if (kind == open::kUnread) return;
    if constexpr (kTakesMatrix) {
      if (i == C::matrix_by_tma() && params.is_matrix_by_tma) return take_from_slot(to, slot, first);
    }
    if (to.is_float) {
      load<float>(to, i, place);
    } else {
      load<Operand>(to, i, place);
    }
  }

  // --- a pass ------------------------------------------------------------------------------------------------------

  template <class Value, class Sums>
  CUTLASS_DEVICE void finish_pass(Sums const& sums, int m, int n, Place place, char* slot) const {
    // Values that are not read may be undefined.
    float of_row[C::kByRow][2], scalars[open::kScalars];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < C::kByRow * 2; ++i) {
      const int at = m * kPassRows + warp * 16 + lane / 4 + i % 2 * 8;
      of_row[i / 2][i % 2] = layout.vector(shared, group, layout.by_row, i / 2)[at];
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < open::kScalars; ++i) scalars[i] = shared.scalars[group][i];
    uint32_t words[C::kIsInBlocks ? kEights * 2 : 1];  // of bf16: [j][r]
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kEights; first += kChunk) {
      // take(j, r, c, element): for each element, one after another.
      const auto for_each = [&](auto const& take) {
        Matrix matrices[open::kMatrices];
        CUTLASS_PRAGMA_UNROLL
        for (int i = C::kGates; i < open::kMatrices; ++i) {
          take_matrix(matrices[i], i, {place.row, place.column + first * 8}, slot, first);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kChunk; ++j) {
          float2 of_column[C::kByColumn];
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < C::kByColumn; ++i) {
            const int at = n * C::kPassColumns + (first + j) * 8 + lane % 4 * 2;
            of_column[i] = *reinterpret_cast<float2 const*>(layout.vector(shared, group, layout.by_column, i) + at);
          }
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < 2; ++r) {
            CUTLASS_PRAGMA_UNROLL
            for (int c = 0; c < 2; ++c) {
              const int eight = n * kEights + first + j;
              float matrix[open::kMatrices];
              CUTLASS_PRAGMA_UNROLL
              for (int i = 0; i < open::kMatrices; ++i) {
                if (i >= C::kGates) {
                  matrix[i] = matrices[i].at(j, r, c);
                  continue;
                }
                matrix[i] = sums(cute::make_coord(c, r, eight + (i + 1) * C::kTileN / 8), m, 0);
                if constexpr (C::kRoots > 0) {
                  const float2 root = of_column[kColumnRoot + i + 1];
                  matrix[i] = C::Sums::apply(of_row[C::kByRow - 1][r], c ? root.y : root.x, matrix[i]);
                }
              }
              take(j, r, c,
                   element(
                       sums(cute::make_coord(c, r, eight), m, 0), [&](int i) { return of_row[i][r]; },
                       [&](int i) { return c ? of_column[i].y : of_column[i].x; }, scalars, matrix));
            }
          }
        }
      };
      if constexpr (kIsNarrow) {
        put_chunk<Value>(for_each, slot, first);
      } else if constexpr (C::kIsInBlocks) {
        compute_chunk<Value>(for_each, words + first * 2);
      } else if constexpr (C::kIsQuantised) {
        put_bytes_of_chunk<Value>(for_each, slot, first);
      } else {
        open::Four four;
        for_each([&](int j, int r, int c, Element const& element) {
          four.set(of_four(r, c), element.sum, element.slots);
          if (r == 0 || c == 0) return;
          float results[4];
          Value::of_four(four, results);
          put(slot, first + j, 0, {results[of_four(0, 0)], results[of_four(0, 1)]});
          put(slot, first + j, 1, {results[of_four(1, 0)], results[of_four(1, 1)]});
        });
      }
    }
    if constexpr (C::kIsInBlocks) {
      quantise_blocks<kEights>(words, params, place, warp, lane);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kEights; ++j) put_bytes(slot, j, words[j * 2] | words[j * 2 + 1] << 16);
    }
  }

  static constexpr int kColumnRoot = C::kByColumn - C::kColumnRoots;  // the first one

  // What the functor is given for one element.
  struct Element {
    float sum, slots[open::kSlots];
  };

  // An element of an eight, among the four for which the functor is called.
  CUTLASS_DEVICE static constexpr int of_four(int r, int c) { return C::kTransposed ? c * 2 + r : r * 2 + c; }

  // `row(i)` and `column(i)`: the kernel's.
  template <class Row, class Column>
  CUTLASS_DEVICE Element element(float sum, Row const& row, Column const& column, const float (&s)[open::kScalars],
                                 const float (&matrix)[open::kMatrices]) const {
    if constexpr (C::kRoots > 0) sum = C::Sums::apply(row(C::kByRow - 1), column(kColumnRoot), sum);
    if constexpr (C::kTransposed) {
      return {sum,
              {row(0), row(1), row(2), row(3), s[0], s[1], s[2], s[3], column(0), column(1), matrix[0], matrix[1]}};
    } else {
      return {
          sum,
          {column(0), column(1), column(2), column(3), s[0], s[1], s[2], s[3], row(0), row(1), matrix[0], matrix[1]}};
    }
  }

  // 16 bits: the values of a chunk, by the functor's near form (open/contract.h). Called by all threads of a warp, as
  // stmatrix has to be; rows and columns beyond D are computed, too.
  template <class Value, class ForEach>
  CUTLASS_DEVICE void put_chunk(ForEach const& for_each, char* slot, int first) const {
    uint32_t words[kWords];  // [j][r]
    compute_chunk<Value>(for_each, words);
    using Store = std::conditional_t<C::kTransposed, cute::SM90_U16x8_STSM_T, cute::SM90_U32x4_STSM_N>;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kChunk; j += 2) {
      uint32_t const* const four = &words[j * 2];
      Store::copy(four[0], four[1], four[2], four[3], matrix_row(slot, first + j));
    }
  }

  template <class Value, class ForEach>
  CUTLASS_DEVICE void compute_chunk(ForEach const& for_each, uint32_t* words) const {
    bool is_far = false;
    open::Four four;
    for_each([&](int j, int r, int c, Element const& element) {
      four.set(of_four(r, c), element.sum, element.slots);
      if (r == 0 || c == 0) return;
      float results[4];
      Value::near_of_four(four, results, is_far);
      words[j * 2] = rounded(results[of_four(0, 0)], results[of_four(0, 1)]);
      words[j * 2 + 1] = rounded(results[of_four(1, 0)], results[of_four(1, 1)]);
    });
    if (Value::has_far() && any_of_whole_warp(is_far)) compute_again<Value>(for_each, words);
  }

  // 8 bits with one scale: the same, in words of two rows.
  template <class Value, class ForEach>
  CUTLASS_DEVICE void put_bytes_of_chunk(ForEach const& for_each, char* slot, int first) const {
    const Divisor divisor(out_scale);
    uint32_t words[kWords];  // [j], and r in their halves
    bool is_far = false;
    open::Four four;
    for_each([&](int j, int r, int c, Element const& element) {
      four.set(of_four(r, c), element.sum, element.slots);
      if (r == 0 || c == 0) return;
      float results[4];
      Value::near_of_four(four, results, is_far);
      CUTLASS_PRAGMA_UNROLL
      for (float& result : results) result = divisor.of(result);
      words[j] = as_e4m3(results[of_four(0, 0)], results[of_four(0, 1)]) |
                 as_e4m3(results[of_four(1, 0)], results[of_four(1, 1)]) << 16;
    });
    if (Value::has_far() && any_of_whole_warp(is_far)) compute_again<Value>(for_each, words);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kChunk; ++j) put_bytes(slot, first + j, words[j]);
  }

  // Four bytes as they are computed: two rows, eight apart, and two columns.
  CUTLASS_DEVICE void put_bytes(char* slot, int j, uint32_t word) const {
    constexpr int kChunkBytes = 16;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = warp * 16 + lane / 4 + r * 8, column = j * 8 + lane % 4 * 2;
      const uint32_t pair = word >> r * 16;
      if constexpr (C::kTransposed) {
        place_in(slot, column, row / kChunkBytes)[row % kChunkBytes] = static_cast<char>(pair);
        place_in(slot, column + 1, row / kChunkBytes)[row % kChunkBytes] = static_cast<char>(pair >> 8);
      } else {
        char* const at = place_in(slot, row, column / kChunkBytes) + column % kChunkBytes;
        *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(pair);
      }
    }
  }

  // All values of a chunk, by the functor's other form. This runs seldom, so its code is short: it computes one element
  // at a time.
  template <class Value, class ForEach>
  CUTLASS_DEVICE void compute_again(ForEach const& for_each, uint32_t* words) const {
    asm volatile("" ::: "memory");  // operands are read again, and need no registers until then
    CUTLASS_PRAGMA_NO_UNROLL
    for (int which = 0; which < kChunk * 4; ++which) {
      Element chosen{};
      for_each([&](int j, int r, int c, Element const& element) {
        if (which == j * 4 + r * 2 + c) chosen = element;
      });
      const float result = Value::of(chosen.sum, chosen.slots);
      uint32_t twice = 0, bytes = 0;  // the result, and which bytes of a word it takes
      if constexpr (kHasWholeWords) {
        const float quotient = Divisor(out_scale).of(result);
        twice = as_e4m3(quotient, quotient), bytes = 0x3210 + ((4 - which % 4) << which % 4 * 4);
      } else {
        twice = rounded(result, result), bytes = which % 2 ? 0x7610 : 0x3254;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kWords; ++i) {
        const uint32_t word = __byte_perm(words[i], twice, bytes);
        // An array in registers has no variable index.
        words[i] = i == which / (kChunk * 4 / kWords) ? word : words[i];
      }
    }
  }

  CUTLASS_DEVICE void put(char* slot, int j, int r, const float (&results)[2]) const {
    if constexpr (C::kTransposed) {
      *number(slot, j, r, 0) = results[0];
      *number(slot, j, r, 1) = results[1];
    } else {
      *reinterpret_cast<float2*>(number(slot, j, r, 0)) = make_float2(results[0], results[1]);
    }
  }

  CUTLASS_DEVICE static uint32_t rounded(float low, float high) {
    cutlass::Array<float, 2> both;
    both[0] = low, both[1] = high;
    using Rounded = std::conditional_t<C::kIsQuantised, cutlass::bfloat16_t, Output>;
    auto const pair = cutlass::NumericArrayConverter<Rounded, float, 2>{}(both);
    return reinterpret_cast<uint32_t const&>(pair);
  }
};

}  // namespace epigemm::sm90
