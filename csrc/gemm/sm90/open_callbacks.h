// One thread's part of an open kernel's epilogue: see open_node.h.
#pragma once

#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "open/contract.h"

namespace epigemm::sm90 {

namespace fusion = cutlass::epilogue::fusion;

struct OpenArguments {
  open::Operands<float> operands;
  const float* row_roots = nullptr;     // along the kernel's rows
  const float* column_roots = nullptr;  // along its columns
};

// The kernel's vectors in one direction: first the roots, where there are any, then the operands' slots.
template <class Traits, bool AlongRows>
struct OpenVectors {
  static constexpr bool are_columns = AlongRows == Traits::kTransposed;  // of D
  static constexpr int kRoots = Traits::Sums::has_roots ? 1 : 0;
  static constexpr int kFirstSlot = are_columns ? open::kColumn0 : open::kRow0;
  static constexpr int kOperands = are_columns ? open::kColumns : open::kRows;
  static constexpr int kCount = kRoots + kOperands;

  int kinds[kCount];

  // Asked once, in one place: every question is a call until the functor is there.
  CUTLASS_DEVICE void ask() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      kinds[i] = i < kRoots ? open::kOfCompute : epigemm_operand(kFirstSlot + i - kRoots);
    }
  }

  CUTLASS_DEVICE static const void* data(OpenArguments const& arguments, int i) {
    if (i >= kRoots) return arguments.operands.data[kFirstSlot + i - kRoots];
    return AlongRows ? arguments.row_roots : arguments.column_roots;
  }

  CUTLASS_DEVICE bool is_float(int i) const {
    return cute::is_same_v<typename Traits::Operand, float> || kinds[i] == open::kOfCompute;
  }

  CUTLASS_DEVICE bool is_read(int i) const { return kinds[i] != open::kUnread; }
};

// One consumer thread's part of a tile. Partition: says which elements are the thread's, and in which order.
template <class Traits, class Partition, class FragmentC>
struct OpenCallbacks : fusion::EmptyConsumerStoreCallbacks {
  using Operand = typename Traits::Operand;
  static constexpr int kTileM = cute::size<0>(typename Traits::TileShape{});
  static constexpr int kTileN = cute::size<1>(typename Traits::TileShape{});

  using RowVectors = OpenVectors<Traits, /*AlongRows=*/true>;
  using ColumnVectors = OpenVectors<Traits, /*AlongRows=*/false>;

  // A thread's rows and columns within the tile: (CPY, CPY_M, CPY_N, EPI_M, EPI_N), stride 0 where nothing changes.
  using Rows = decltype(Partition::rows(0));
  using Columns = decltype(Partition::columns(0));
  using OfTile = decltype(cute::make_tensor_like<float>(std::declval<Rows>()));
  using OfPass = decltype(cute::make_tensor_like<float>(cute::take<0, 3>(std::declval<Columns>())));
  static constexpr int kPassElements = decltype(cute::size(cute::take<0, 3>(cute::shape(std::declval<Rows>()))))::value;

  OpenArguments const& arguments;
  FragmentC const& c;
  char* const shared;
  const int m_end, n_end, m_begin, n_begin;  // the kernel's extents, and where its tile begins
  const int thread;

  RowVectors row_vectors;
  ColumnVectors column_vectors;
  int matrix_kinds[open::kMatrices];

  float scalars[open::kScalars];
  OfTile by_row[RowVectors::kCount];
  OfPass by_column[ColumnVectors::kCount];
  uint32_t by_element[open::kMatrices][kPassElements];

  template <class Extents, class Coordinates>
  CUTLASS_DEVICE OpenCallbacks(OpenArguments const& arguments, FragmentC const& c, char* shared, Extents const& extents,
                               Coordinates const& tile, int thread)
      : arguments(arguments),
        c(c),
        shared(shared),
        m_end(cute::get<0>(extents)),
        n_end(cute::get<1>(extents)),
        m_begin(static_cast<int>(cute::get<0>(tile)) * kTileM),
        n_begin(static_cast<int>(cute::get<1>(tile)) * kTileN),
        thread(thread) {
    row_vectors.ask();
    column_vectors.ask();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < open::kMatrices; ++i) {
      matrix_kinds[i] = epigemm_operand(open::kMatrix0 + i);
      CUTLASS_PRAGMA_UNROLL
      for (uint32_t& word : by_element[i]) word = 0;
    }
    // What is not read is zero all along, that is, nothing.
    CUTLASS_PRAGMA_UNROLL
    for (float& scalar : scalars) scalar = 0;
    CUTLASS_PRAGMA_UNROLL
    for (OfTile& values : by_row) cute::clear(values);
    CUTLASS_PRAGMA_UNROLL
    for (OfPass& values : by_column) cute::clear(values);
  }

  // --- once a tile ---------------------------------------------------------------------------------------------------

  // Behind the mainloop. A kernel ahead in the stream may have written the operands: until it is done nothing is read.
  CUTLASS_DEVICE void begin() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    load_scalars();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < ColumnVectors::kCount; ++i) {
      if (!is_staged(i)) continue;
      if (column_vectors.is_float(i)) {
        stage<float>(i);
      } else {
        stage<Operand>(i);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < RowVectors::kCount; ++i) {
      if (!row_vectors.is_read(i)) continue;
      if (row_vectors.is_float(i)) {
        load_by_row<float>(i);
      } else {
        load_by_row<Operand>(i);
      }
    }
  }

  CUTLASS_DEVICE bool begin_sync_needed() const {
    bool is_any_staged = false;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < ColumnVectors::kCount; ++i) is_any_staged = is_any_staged || is_staged(i);
    return is_any_staged;
  }

  CUTLASS_DEVICE void load_scalars() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < open::kScalars; ++i) {
      if (epigemm_operand(open::kScalar0 + i) == open::kUnread) continue;
      auto* const data = static_cast<const float*>(arguments.operands.data[open::kScalar0 + i]);
      scalars[i] = data ? *data : arguments.operands.scalars[i];
    }
  }

  template <class T>
  CUTLASS_DEVICE void load_by_row(int i) {
    auto* const from = static_cast<const T*>(RowVectors::data(arguments, i));
    auto const to = cute::filter_zeros(by_row[i]);
    auto const rows = cute::filter_zeros(Partition::rows(thread));
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < cute::size(to); ++j) {
      const int m = m_begin + rows(j);
      to(j) = from && m < m_end ? static_cast<float>(from[m]) : 0.0f;
    }
  }

  // --- vectors along the columns -------------------------------------------------------------------------------------

  CUTLASS_DEVICE int shared_bytes(int i) const {
    if (!column_vectors.is_read(i)) return 0;
    return kTileN * static_cast<int>(column_vectors.is_float(i) ? sizeof(float) : sizeof(Operand));
  }

  CUTLASS_DEVICE int shared_offset(int i) const {
    int offset = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int before = 0; before < ColumnVectors::kCount; ++before) {
      if (before < i) offset += shared_bytes(before);
    }
    return offset;
  }

  // The others have no room and are read where they are.
  CUTLASS_DEVICE bool is_staged(int i) const {
    return column_vectors.is_read(i) && shared_offset(i) + shared_bytes(i) <= Traits::kSharedBytes;
  }

  template <class T>
  CUTLASS_DEVICE void stage(int i) {
    auto* const from = static_cast<const T*>(ColumnVectors::data(arguments, i));
    auto* const to = reinterpret_cast<T*>(shared + shared_offset(i));
    CUTLASS_PRAGMA_UNROLL
    for (int j = thread; j < kTileN; j += Partition::kThreads) {
      to[j] = from && n_begin + j < n_end ? from[n_begin + j] : T(0);
    }
  }

  template <class T>
  CUTLASS_DEVICE void fetch_staged(int i, int epi_m, int epi_n) {
    auto const all = Partition::staged(reinterpret_cast<const T*>(shared + shared_offset(i)), thread);
    auto const from = cute::filter_zeros(all(cute::_, cute::_, cute::_, epi_m, epi_n));
    auto values = cute::make_tensor_like<T>(from);
    cute::copy_aligned(from, values);
    auto const to = cute::filter_zeros(by_column[i]);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < cute::size(values); ++j) {
      if constexpr (sizeof(T) == sizeof(uint16_t)) {
        const int at = values.layout()(j);
        to(j) = half_of<T>(reinterpret_cast<uint32_t const*>(values.data())[at / 2], at % 2);
      } else {
        to(j) = values(j);
      }
    }
  }

  // Of two 16-bit numbers that share a register the first or the second. Taken for numbers by themselves, the second
  // costs two instructions more.
  template <class T>
  CUTLASS_DEVICE static float half_of(uint32_t word, int which) {
    return static_cast<float>(T::bitcast(static_cast<uint16_t>(which ? word >> 16 : word)));
  }

  template <class T>
  CUTLASS_DEVICE void fetch_direct(int i, int epi_m, int epi_n) {
    auto* const from = static_cast<const T*>(ColumnVectors::data(arguments, i));
    auto const columns = cute::filter_zeros(Partition::columns(thread)(cute::_, cute::_, cute::_, epi_m, epi_n));
    auto const to = cute::filter_zeros(by_column[i]);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < cute::size(to); ++j) {
      const int n = n_begin + columns(j);
      to(j) = from && n < n_end ? static_cast<float>(from[n]) : 0.0f;
    }
  }

  template <class T>
  CUTLASS_DEVICE void fetch_column_vector(int i, int epi_m, int epi_n) {
    if (is_staged(i)) {
      fetch_staged<T>(i, epi_m, epi_n);
    } else {
      fetch_direct<T>(i, epi_m, epi_n);
    }
  }

  // --- matrices ------------------------------------------------------------------------------------------------------

  CUTLASS_DEVICE bool is_loaded(int i) const {
    return matrix_kinds[i] != open::kUnread && !(Traits::kMatrixByTma && i == 0);
  }

  CUTLASS_DEVICE bool is_matrix_float(int i) const {
    return cute::is_same_v<Operand, float> || matrix_kinds[i] == open::kOfCompute;
  }

  // A thread's elements are neighbours in the kernel's row two by two. Where D lies as the kernel's rows, every such
  // pair is one load, if rows and pairs agree.
  CUTLASS_DEVICE bool has_aligned_pairs(int i) const {
    const uint64_t bytes = is_matrix_float(i) ? sizeof(float) : sizeof(Operand);
    const uint64_t address = reinterpret_cast<uint64_t>(arguments.operands.data[open::kMatrix0 + i]);
    const uint64_t stride = static_cast<uint64_t>(arguments.operands.matrix_strides[i]) * bytes;
    return ((address | stride) & (2 * bytes - 1)) == 0 && n_end % 2 == 0;
  }

  template <class T>
  CUTLASS_DEVICE const T* element_address(int i, int m, int n) const {
    auto* const data = static_cast<const T*>(arguments.operands.data[open::kMatrix0 + i]);
    const int64_t stride = arguments.operands.matrix_strides[i];
    return Traits::kTransposed ? data + n * stride + m : data + m * stride + n;
  }

  template <class T>
  CUTLASS_DEVICE void load_pairs(int i, int epi_m, int epi_n) {
    auto const rows = Partition::rows(thread)(cute::_, cute::_, cute::_, epi_m, epi_n);
    auto const columns = Partition::columns(thread)(cute::_, cute::_, cute::_, epi_m, epi_n);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kPassElements; j += 2) {
      const int m = m_begin + rows(j), n = n_begin + columns(j);
      cutlass::AlignedArray<T, 2> pair;
      pair.clear();
      if (m < m_end && n < n_end) {
        pair = *reinterpret_cast<cutlass::AlignedArray<T, 2> const*>(element_address<T>(i, m, n));
      }
      keep<T>(i, j, pair);
    }
  }

  template <class T>
  CUTLASS_DEVICE void load_singly(int i, int epi_m, int epi_n) {
    auto const rows = Partition::rows(thread)(cute::_, cute::_, cute::_, epi_m, epi_n);
    auto const columns = Partition::columns(thread)(cute::_, cute::_, cute::_, epi_m, epi_n);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kPassElements; j += 2) {
      cutlass::AlignedArray<T, 2> pair;
      pair.clear();
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 2; ++k) {
        const int m = m_begin + rows(j + k), n = n_begin + columns(j + k);
        if (m < m_end && n < n_end) pair[k] = *element_address<T>(i, m, n);
      }
      keep<T>(i, j, pair);
    }
  }

  // As they lie in memory: two of 16 bits share a register.
  template <class T>
  CUTLASS_DEVICE void keep(int i, int j, cutlass::AlignedArray<T, 2> const& pair) {
    auto* const words = reinterpret_cast<uint32_t const*>(&pair);
    if constexpr (sizeof(T) == sizeof(uint32_t)) {
      by_element[i][j] = words[0];
      by_element[i][j + 1] = words[1];
    } else {
      by_element[i][j / 2] = words[0];
    }
  }

  CUTLASS_DEVICE float kept(int i, int at) const {
    if constexpr (sizeof(Operand) == sizeof(uint16_t)) {
      if (!is_matrix_float(i)) return half_of<Operand>(by_element[i][at / 2], at % 2);
    }
    return __uint_as_float(by_element[i][at]);
  }

  template <class T>
  CUTLASS_DEVICE void load_matrix(int i, int epi_m, int epi_n) {
    if (!Traits::kTransposed && has_aligned_pairs(i)) {
      load_pairs<T>(i, epi_m, epi_n);
    } else {
      load_singly<T>(i, epi_m, epi_n);
    }
  }

  // --- once a pass ---------------------------------------------------------------------------------------------------

  CUTLASS_DEVICE void begin_loop(int epi_m, int epi_n) {
    if (epi_m == 0) fetch_column_vectors(epi_n);  // the passes go down the rows first
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < open::kMatrices; ++i) {
      if (!is_loaded(i)) continue;
      if (is_matrix_float(i)) {
        load_matrix<float>(i, epi_m, epi_n);
      } else {
        load_matrix<Operand>(i, epi_m, epi_n);
      }
    }
  }

  CUTLASS_DEVICE void fetch_column_vectors(int epi_n) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < ColumnVectors::kCount; ++i) {
      if (!column_vectors.is_read(i)) continue;
      if (column_vectors.is_float(i)) {
        fetch_column_vector<float>(i, /*epi_m=*/0, epi_n);
      } else {
        fetch_column_vector<Operand>(i, /*epi_m=*/0, epi_n);
      }
    }
  }

  template <class Sum, int Count>
  CUTLASS_DEVICE cutlass::Array<typename Traits::Output, Count> visit(cutlass::Array<Sum, Count> const& sums, int epi_v,
                                                                      int epi_m, int epi_n) {
    cutlass::Array<float, Count> results;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Count; ++i) results[i] = apply(sums[i], epi_v * Count + i, epi_m, epi_n);
    return cutlass::NumericArrayConverter<typename Traits::Output, float, Count>{}(results);
  }

  // The element `at` of a pass.
  CUTLASS_DEVICE float apply(float sum, int at, int epi_m, int epi_n) const {
    constexpr int first_row = RowVectors::kRoots, first_column = ColumnVectors::kRoots;
    auto const row_value = [&](int i) { return by_row[i](cute::_, cute::_, cute::_, epi_m, epi_n)(at); };
    auto const column_value = [&](int i) { return by_column[i](at); };
    const float acc = Traits::Sums::apply(row_value(0), column_value(0), sum);
    auto const column = [&](int i) {  // of D
      if constexpr (Traits::kTransposed) {
        return row_value(first_row + i);
      } else {
        return column_value(first_column + i);
      }
    };
    auto const row = [&](int i) {
      if constexpr (Traits::kTransposed) {
        return column_value(first_column + i);
      } else {
        return row_value(first_row + i);
      }
    };
    return epigemm_apply(acc, column(0), column(1), column(2), column(3), scalars[0], scalars[1], scalars[2],
                         scalars[3], row(0), row(1), matrix(0, at), matrix(1, at));
  }

  CUTLASS_DEVICE float matrix(int i, int at) const {
    if constexpr (Traits::kMatrixByTma) {
      if (i == 0) return static_cast<float>(c(at));
    }
    return kept(i, at);
  }
};

}  // namespace epigemm::sm90
