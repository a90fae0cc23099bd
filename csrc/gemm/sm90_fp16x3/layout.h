// How a matrix lies in memory once it is split into fp16 pieces. Plain C++: no CUDA, no torch.
//
// One buffer, its sections at multiples of 256 bytes:
//   roots   fp32[rows]    2^(-e / 2) for the row's scale 2^e
//   facts   int32[rows]   what the range guard has to know of the row (guard.h)
//   pieces  fp16          two pieces: [rows, columns / 64, 2, 64], 64 hi and then their 64 lo: what a stage of the
//                         mainloop reads of a row is 256 bytes in one place; one piece: [rows, columns]
// Columns are padded with zeros.
#pragma once

#include <cstdint>

namespace epigemm::sm90_fp16x3 {

constexpr int kPieces = 2;       // hi and lo
constexpr int kInterleave = 64;  // elements of hi, then as many of lo

constexpr int64_t kBufferAlignment = 16;  // of the buffer's start: what TMA and vector loads ask for
constexpr int64_t kSectionAlignment = 256;

// The facts of a row count elements in 28 bits.
constexpr int64_t kMostColumns = (int64_t(1) << 28) - kInterleave;

constexpr int64_t round_up_to(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// With one piece a multiple of TMA's 16 bytes is enough.
constexpr int64_t padded_columns(int64_t columns, int pieces) {
  return round_up_to(columns, pieces == kPieces ? kInterleave : 8);
}

// Where a column's piece lies in its row of pieces.
#if defined(__CUDACC__)
__host__ __device__
#endif
    constexpr int64_t piece_offset(int64_t column, int piece, int pieces) {
  return pieces == 1 ? column : (column / kInterleave * kPieces + piece) * kInterleave + column % kInterleave;
}

// An fp32 matrix with any strides, in elements.
struct StridedMatrix {
  const float* data = nullptr;
  int64_t rows = 0, columns = 0;
  int64_t row_stride = 0, column_stride = 0;
};

// A matrix in pieces.
struct SplitMatrix {
  float* roots = nullptr;
  int32_t* facts = nullptr;
  void* pieces = nullptr;  // fp16
  int64_t rows = 0, columns = 0, padded_columns = 0;
};

constexpr int64_t split_bytes(int64_t rows, int64_t columns, int pieces) {
  return 2 * round_up_to(4 * rows, kSectionAlignment) +
         round_up_to(2 * pieces * rows * padded_columns(columns, pieces), kSectionAlignment);
}

inline SplitMatrix split_view(void* buffer, int64_t rows, int64_t columns, int pieces) {
  const int64_t section = round_up_to(4 * rows, kSectionAlignment);
  char* const start = static_cast<char*>(buffer);
  return {
      reinterpret_cast<float*>(start), reinterpret_cast<int32_t*>(start + section), start + 2 * section, rows, columns,
      padded_columns(columns, pieces)};
}

}  // namespace epigemm::sm90_fp16x3
