// How a matrix lies in memory once it is split into fp16 slices. Plain C++: no CUDA, no torch.
//
// One buffer, its sections at multiples of 256 bytes:
//   roots   fp32[rows]    2^(-e / 2) for the row's scale 2^e
//   statistics   int32[rows]   what the range check has to know of the row (range_check.h)
//   tiny    int32[rows]   how many of its elements lose bits
//   slices  fp16          two slices: [rows, columns / 64, 2, 64], 64 hi and then their 64 lo: what a stage of the
//                         mainloop reads of a row is 256 bytes in one place; one slice: [rows, columns]
// Columns are padded with zeros.
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

// With one slice a multiple of TMA's 16 bytes is enough.
constexpr int64_t padded_columns(int64_t columns, int slices) {
  return round_up_to(columns, slices == kSlices ? kInterleave : 8);
}

// Where a column's slice lies in its row of slices.
#if defined(__CUDACC__)
__host__ __device__
#endif
    constexpr int64_t slice_offset(int64_t column, int slice, int slices) {
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

constexpr int64_t split_bytes(int64_t rows, int64_t columns, int slices) {
  return 3 * round_up_to(4 * rows, kSectionAlignment) +
         round_up_to(2 * slices * rows * padded_columns(columns, slices), kSectionAlignment);
}

inline SplitMatrix split_view(void* buffer, int64_t rows, int64_t columns, int slices) {
  const int64_t section = round_up_to(4 * rows, kSectionAlignment);
  char* const start = static_cast<char*>(buffer);
  return {reinterpret_cast<float*>(start),
          reinterpret_cast<int32_t*>(start + section),
          reinterpret_cast<int32_t*>(start + 2 * section),
          start + 3 * section,
          rows,
          columns,
          padded_columns(columns, slices)};
}

}  // namespace epigemm::fp16_slices
