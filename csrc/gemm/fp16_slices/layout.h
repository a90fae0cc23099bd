// How a matrix lies in memory once it is split into fp16 slices. Plain C++: no CUDA, no torch.
//
// One buffer, its sections at multiples of 256 bytes:
//   roots   fp32[rows]    2^(-e / 2) for the row's scale 2^e
//   statistics   int32[rows]   what the range check has to know of the row (range_check.h)
//   tiny    int32[rows]   how many of its elements lose bits
//   slices  fp16          two slices: [rows, columns / 64, 2, 64], 64 hi and then their 64 lo: what a stage of the
//                         mainloop reads of a row is 256 bytes in one place; one slice: [rows, columns]
// Columns are padded with zeros. x's slices for a weight that is read as it lies may have another order (SliceOrder).
#pragma once

#include <cstdint>

namespace epigemm::fp16_slices {

constexpr int kSlices = 2;       // hi and lo
constexpr int kInterleave = 64;  // elements of hi, then as many of lo

constexpr int64_t kBufferAlignment = 16;  // of the buffer's start: what TMA and vector loads ask for
constexpr int64_t kSectionAlignment = 256;

// The statistics of a row count elements in 28 bits.
constexpr int64_t kMostColumns = (int64_t(1) << 28) - kInterleave;

constexpr int64_t round_up_to(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// Of columns.
enum class SliceOrder {
  Plain,
  Turned,  // groups of four are moved within 32, so that the kernel finds them (sm90_fp16x3/weight_order.h)
};

// With one slice a multiple of TMA's 16 bytes is enough, unless columns are moved.
constexpr int64_t padded_columns(int64_t columns, int slices, SliceOrder order = SliceOrder::Plain) {
  return round_up_to(columns, slices == kSlices || order == SliceOrder::Turned ? kInterleave : 8);
}

// Where a column's slice lies in its row of slices.
#if defined(__CUDACC__)
__host__ __device__
#endif
    constexpr int64_t slice_offset(int64_t column, int slice, int slices, SliceOrder order = SliceOrder::Plain) {
  if (order == SliceOrder::Turned) {
    const int64_t group = column / 4 % 8;  // its three bits turn round by one
    column = column / 32 * 32 + (group % 4 * 2 + group / 4) * 4 + column % 4;
  }
  return slices == 1 ? column : (column / kInterleave * kSlices + slice) * kInterleave + column % kInterleave;
}

// An fp32 matrix with any strides, in elements.
struct StridedMatrix {
  const float* data = nullptr;
  int64_t rows = 0, columns = 0;
  int64_t row_stride = 0, column_stride = 0;
};

// A matrix in slices.
struct SplitMatrix {
  float* roots = nullptr;
  int32_t* statistics = nullptr;
  int32_t* tiny = nullptr;
  void* slices = nullptr;  // fp16
  int64_t rows = 0, columns = 0, padded_columns = 0;
};

constexpr int64_t split_bytes(int64_t rows, int64_t columns, int slices, SliceOrder order = SliceOrder::Plain) {
  return 3 * round_up_to(4 * rows, kSectionAlignment) +
         round_up_to(2 * slices * rows * padded_columns(columns, slices, order), kSectionAlignment);
}

inline SplitMatrix split_view(void* buffer, int64_t rows, int64_t columns, int slices,
                              SliceOrder order = SliceOrder::Plain) {
  const int64_t section = round_up_to(4 * rows, kSectionAlignment);
  char* const start = static_cast<char*>(buffer);
  return {reinterpret_cast<float*>(start),
          reinterpret_cast<int32_t*>(start + section),
          reinterpret_cast<int32_t*>(start + 2 * section),
          start + 3 * section,
          rows,
          columns,
          padded_columns(columns, slices, order)};
}

// Of a weight that is read as it lies: no slices, but the roots with which the kernel begins beside those that it
// finds, and the statistics of groups of rows, each as those of a row: what all of its rows have.
constexpr int kGroupRows = 16;

constexpr int64_t groups_of(int64_t rows) { return (rows + kGroupRows - 1) / kGroupRows; }

// `weights`: of so many rows each, whose groups of rows are apart.
constexpr int64_t rows_bytes(int64_t rows, int64_t weights = 1) {
  return 4 * round_up_to(4 * weights * rows, kSectionAlignment) +
         round_up_to(4 * weights * groups_of(rows), kSectionAlignment);
}

inline float* first_roots(void* buffer, int64_t rows) {
  return reinterpret_cast<float*>(static_cast<char*>(buffer) + 3 * round_up_to(4 * rows, kSectionAlignment));
}

#if defined(__CUDACC__)
__host__ __device__
#endif
    inline int32_t* statistics_of_groups(void* buffer, int64_t rows) {
  return reinterpret_cast<int32_t*>(static_cast<char*>(buffer) + 4 * round_up_to(4 * rows, kSectionAlignment));
}

inline SplitMatrix rows_view(void* buffer, int64_t rows, int64_t columns) {
  SplitMatrix view = split_view(buffer, rows, columns, 1);
  view.slices = nullptr;
  return view;
}

}  // namespace epigemm::fp16_slices
