#include "gemm/planner/copies.h"

#include <cstdint>

#include "gemm/grid.h"
#include "gemm/planner/cost.h"

namespace epigemm {
namespace {

constexpr int64_t kRowBytes = 16, kElementBytes = 2, kVector = kRowBytes / kElementBytes;
constexpr int64_t kSection = 256;  // bytes: where the next copy begins

bool is_whole(int64_t elements) { return elements % kVector == 0; }

bool is_addressable(const Matrix& matrix, int64_t columns) {
  return matrix.column_stride == 1 && is_whole(columns) && is_whole(matrix.row_stride) &&
         matrix.row_stride >= columns && reinterpret_cast<uintptr_t>(matrix.data) % kRowBytes == 0;
}

// Whether the copying kernel can read the matrix, by rows or by columns.
bool is_copyable(const Matrix& matrix) { return matrix.column_stride == 1 || matrix.row_stride == 1; }

// Elements of a copy's row: a multiple of 16 bytes, or of L2's lines, which the kernels load faster, if that adds
// little.
int64_t copied_columns(int64_t columns) {
  constexpr int64_t kLine = 64;
  if (is_whole(columns)) return columns;
  const int64_t lines = round_up(columns, kLine);
  return 8 * lines <= 9 * columns ? lines : round_up(columns, kVector);
}

double bytes_of(int64_t rows, int64_t columns) {
  return static_cast<double>(kElementBytes) * static_cast<double>(rows) * static_cast<double>(columns);
}

Matrix copy_of(const Matrix& matrix, int64_t columns) { return {nullptr, matrix.element, copied_columns(columns), 1}; }

int64_t section_bytes(int64_t rows, int64_t columns) {
  return round_up(kElementBytes * rows * copied_columns(columns), kSection);
}

std::string described(const char* argument, const Matrix& matrix) {
  return std::string(argument) + (matrix.column_stride == 1 ? " is copied to padded rows" : " is transposed by a copy");
}

}  // namespace

Copies copies_for(const Problem& p) {
  if (element_bytes(p.x.element) != kElementBytes || p.is_batch_invariant || p.device.capability == 0) return {};
  if (p.is_pair || p.groups) return {};  // several weights are never copied
  // Nor is a matrix beside the result, which has the result's layout.
  if (epilogue_info(p.epilogue).has_store && !is_addressable(p.out, p.n)) return {};
  if (!is_copyable(p.x) || !is_copyable(p.weight) || p.out.column_stride != 1) return {};
  // What is behind a row that ends between 16 bytes is not zeros.
  return {!is_addressable(p.x, p.k), !is_addressable(p.weight, p.k), !is_addressable(p.out, p.n)};
}

Copies copies_for_sizes(const Problem& p) { return {!is_whole(p.k), !is_whole(p.k), !is_whole(p.n)}; }

Problem on_copies(const Problem& problem) {
  Problem on = problem;
  if (!problem.copies.any()) return on;
  const Copies& copies = problem.copies;
  if (copies.x) on.x = copy_of(problem.x, problem.k);
  if (copies.weight) on.weight = copy_of(problem.weight, problem.k);
  if (copies.x && copies.weight) on.k = copied_columns(problem.k);
  if (copies.out) on.out = copy_of(problem.out, problem.n);
  on.is_out_padded = on.is_out_padded || copies.out;
  on.alignment = kRowBytes;  // at least: matrices that are not copied have it
  on.copies = {};
  return on;
}

int64_t bytes_of_steps(const Problem& p) {
  int64_t bytes = p.alignment | kElementBytes * (p.k | p.n);
  for (const Matrix& matrix : {p.x, p.weight, p.out}) {
    bytes |= kElementBytes * (matrix.column_stride == 1 ? matrix.row_stride : matrix.column_stride);
  }
  return bytes;
}

// The time of the bytes at the memory's speed, as if L2 kept nothing for the next kernel, and for each kernel about the
// time that an elementwise kernel adds behind a product (fallback.cpp). Transposing a weight takes longer by the time
// that calls took more than predicted at 8192x768x3072, 8192x768x768, 4096x3072x768 and 2048x3072x768 (5.0 to 5.6 us,
// H100).
double copies_microseconds(const Problem& p) {
  constexpr double kKernelUs = 3.2, kTurnedUs = 5.2, kMatrixUs = 7e-6;
  const Copies& copies = p.copies;
  if (!copies.any()) return 0;
  const int64_t columns = p.k + copied_columns(p.k);  // read and written
  const double bytes = (copies.x ? bytes_of(p.m, columns) : 0) + (copies.weight ? bytes_of(p.n, columns) : 0) +
                       (copies.out ? bytes_of(p.m, 2 * p.n) : 0);
  const int kernels = (copies.x || copies.weight ? 1 : 0) + (copies.out ? 1 : 0);
  const bool is_turned = (copies.x && p.x.column_stride != 1) || (copies.weight && p.weight.column_stride != 1);
  const bool is_matrix_read = !is_whole(p.n) && cost::matrix_bytes(p) > 0;
  const double matrix_us = is_matrix_read ? kMatrixUs * static_cast<double>(p.m) * static_cast<double>(p.n) : 0;
  return kKernelUs * kernels + (is_turned ? kTurnedUs : 0) + bytes / p.device.memory_bytes_per_us + matrix_us;
}

int64_t copies_bytes(const Problem& p) {
  return (p.copies.x ? section_bytes(p.m, p.k) : 0) + (p.copies.weight ? section_bytes(p.n, p.k) : 0) +
         (p.copies.out ? section_bytes(p.m, p.n) : 0);
}

void place_copies(const Problem& p, void* workspace, Problem* on) {
  char* next = static_cast<char*>(workspace);
  const auto place = [&](bool is_copied, int64_t rows, int64_t columns, Matrix* matrix) {
    if (!is_copied) return;
    matrix->data = next;
    next += section_bytes(rows, columns);
  };
  place(p.copies.x, p.m, p.k, &on->x);
  place(p.copies.weight, p.n, p.k, &on->weight);
  place(p.copies.out, p.m, p.n, &on->out);
}

std::vector<std::string> describe_copies(const Problem& p) {
  std::vector<std::string> texts;
  if (p.copies.x) texts.push_back(described("x", p.x));
  if (p.copies.weight) texts.push_back(described("weight", p.weight));
  return texts;
}

}  // namespace epigemm
