// The split on a CPU, row by row: the same bits as on a GPU. It serves the tests, not speed.
#include "gemm/sm90_fp16x3/split_rows.h"

#include "cpu/types.h"
#include "gemm/sm90_fp16x3/slices.h"

namespace epigemm::sm90_fp16x3 {
namespace {

using cpu::Float16;

float largest_of(const float* row, const StridedMatrix& matrix) {
  float largest = 0.0f;
  for (int64_t column = 0; column < matrix.columns; ++column) {
    const float element = finite_magnitude(row[column * matrix.column_stride]);
    if (element > largest) largest = element;
  }
  return largest;
}

Float16 to_half(float x) { return cpu::from_compute<Float16>(x); }
float to_float(Float16 x) { return cpu::to_compute(x); }

}  // namespace

void split_rows_cpu(const StridedMatrix& matrix, int slices, void* buffer) {
  const SplitMatrix out = split_view(buffer, matrix.rows, matrix.columns, slices);
  for (int64_t r = 0; r < matrix.rows; ++r) {
    const float* row = matrix.data + r * matrix.row_stride;
    const float largest = largest_of(row, matrix);
    const RowScale scale = row_scale(largest);
    auto* halves = static_cast<Float16*>(out.slices) + r * out.padded_columns * slices;
    int32_t large = 0, flags = 0, tiny = 0;
    for (int64_t column = 0; column < out.padded_columns; ++column) {
      const float x = column < matrix.columns ? row[column * matrix.column_stride] : 0.0f;
      const float s = scaled(x, scale);
      large += column < matrix.columns ? large_count(s, scale) : 0;
      flags |= element_flags(x);
      tiny += tiny_count(x, s);
      const Slices<Float16> split = split_element<Float16>(s, to_half, to_float);
      halves[slice_offset(column, 0, slices)] = split.high;
      if (slices == kSlices) halves[slice_offset(column, 1, slices)] = split.low;
    }
    out.roots[r] = row_root(row_exponent(largest));
    out.statistics[r] = row_statistics(large, flags, tiny, scale, matrix.columns);
    out.tiny[r] = tiny;
  }
}

}  // namespace epigemm::sm90_fp16x3
