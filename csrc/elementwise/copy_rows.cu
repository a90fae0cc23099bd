// Every thread writes whole vectors of the copy, and reads their elements by the widest access that their alignment
// allows. A copy is one pass over memory; rows of odd lengths begin at every second byte, so that no wider load fits
// all of them.
#include "elementwise/copy_rows.h"

#include <algorithm>

#include "device/dependent.cuh"
#include "device/launch.h"

namespace epigemm {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;   // elements that a thread writes at once: 16 bytes
constexpr int kEach = 4;     // vectors of a thread, where it copies from rows
constexpr int kSquare = 64;  // rows and columns of the square that a CTA transposes in shared memory

enum class Way {
  Rows,    // row by row
  OneRow,  // the copy has no gaps: one long row
  Turned,  // from columns
};

struct Job {
  RowsCopy copy;
  Way way;
  int load_bytes, store_bytes;  // what every vector can be read by, and written by
  unsigned blocks;
};

struct alignas(16) Vector {
  uint16_t at[kVector];
};

template <int Bytes>
struct Word;
template <>
struct Word<2> {
  using Type = uint16_t;
};
template <>
struct Word<4> {
  using Type = uint32_t;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<16> {
  using Type = uint4;
};

template <int Bytes, class To, class From>
__device__ __forceinline__ void move(To* to, const From* from) {
  using Type = typename Word<Bytes>::Type;
  *reinterpret_cast<Type*>(to) = *reinterpret_cast<const Type*>(from);
}

// A vector of which `count` elements are read; the others are zeros.
template <int Bytes>
__device__ __forceinline__ void load(const uint16_t* from, int count, Vector& vector) {
  constexpr int kStep = Bytes / 2;
#pragma unroll
  for (int i = 0; i < kVector; i += kStep) {
    if (i + kStep <= count) {
      move<Bytes>(vector.at + i, from + i);
    } else {
#pragma unroll
      for (int j = i; j < i + kStep; ++j) vector.at[j] = j < count ? from[j] : uint16_t(0);
    }
  }
}

template <int Bytes>
__device__ __forceinline__ void store(uint16_t* to, int count, const Vector& vector) {
  constexpr int kStep = Bytes / 2;
#pragma unroll
  for (int i = 0; i < kVector; i += kStep) {
    if (i + kStep <= count) {
      move<Bytes>(to + i, vector.at + i);
    } else {
#pragma unroll
      for (int j = i; j < i + kStep; ++j) {
        if (j < count) to[j] = vector.at[j];
      }
    }
  }
}

__device__ __forceinline__ void load_by(int bytes, const uint16_t* from, int count, Vector& vector) {
  switch (bytes) {
    case 16:
      return load<16>(from, count, vector);
    case 8:
      return load<8>(from, count, vector);
    case 4:
      return load<4>(from, count, vector);
    default:
      return load<2>(from, count, vector);
  }
}

__device__ __forceinline__ void store_by(int bytes, uint16_t* to, int count, const Vector& vector) {
  switch (bytes) {
    case 16:
      return store<16>(to, count, vector);
    case 8:
      return store<8>(to, count, vector);
    case 4:
      return store<4>(to, count, vector);
    default:
      return store<2>(to, count, vector);
  }
}

__device__ __forceinline__ int at_most_a_vector(int64_t count) {
  return static_cast<int>(max(int64_t(0), min(int64_t(kVector), count)));
}

// The row and the column of a place in rows of `length`.
struct RowPlace {
  int64_t row;
  int64_t rest;
};

__device__ __forceinline__ RowPlace divided(int64_t place, int64_t length) {
  // A division of 64 bits takes several times as long.
  if (place >> 32 == 0 && length >> 32 == 0) {
    const auto narrow = static_cast<uint32_t>(place), by = static_cast<uint32_t>(length);
    return {narrow / by, narrow % by};
  }
  return {place / length, place % length};
}

__device__ __forceinline__ void copy_rows(const Job& job, int64_t block) {
  const RowsCopy& copy = job.copy;
  const auto* const from = static_cast<const uint16_t*>(copy.from);
  auto* const to = static_cast<uint16_t*>(copy.to);
  const int64_t of_row = (copy.filled + kVector - 1) / kVector, vectors = copy.rows * of_row;
  Vector read[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t place = (block * kEach + i) * kThreads + threadIdx.x;
    if (place >= vectors) break;
    const RowPlace at = divided(place, of_row);
    const int64_t column = at.rest * kVector;
    load_by(job.load_bytes, from + at.row * copy.row_stride + column, at_most_a_vector(copy.columns - column), read[i]);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t place = (block * kEach + i) * kThreads + threadIdx.x;
    if (place >= vectors) break;
    const RowPlace at = divided(place, of_row);
    const int64_t column = at.rest * kVector;
    store_by(job.store_bytes, to + at.row * copy.to_stride + column, at_most_a_vector(copy.filled - column), read[i]);
  }
}

// A vector of the copy may have the end of one row and the beginning of the next, or more of them.
__device__ __forceinline__ void copy_one_row(const Job& job, int64_t block) {
  const RowsCopy& copy = job.copy;
  const auto* const from = static_cast<const uint16_t*>(copy.from);
  auto* const to = static_cast<uint16_t*>(copy.to);
  const int64_t elements = copy.rows * copy.columns;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t first = ((block * kEach + i) * kThreads + threadIdx.x) * kVector;
    if (first >= elements) break;
    const int count = at_most_a_vector(elements - first);
    RowPlace at = divided(first, copy.columns);
    Vector vector;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      vector.at[j] = j < count ? from[at.row * copy.row_stride + at.rest] : uint16_t(0);
      if (++at.rest == copy.columns) at = {at.row + 1, 0};
    }
    store_by(job.store_bytes, to + first, count, vector);
  }
}

__device__ __forceinline__ void copy_turned(const Job& job, int64_t block) {
  constexpr int kWarps = kThreads / 32, kVectorsOfRow = kSquare / kVector;
  __shared__ uint16_t square[kSquare][kSquare + 2];  // [column][row]; + 2: columns of it lie in other banks
  const RowsCopy& copy = job.copy;
  const auto* const from = static_cast<const uint16_t*>(copy.from);
  auto* const to = static_cast<uint16_t*>(copy.to);
  const int64_t squares_down = (copy.rows + kSquare - 1) / kSquare;
  const int64_t r0 = block % squares_down * kSquare, c0 = block / squares_down * kSquare;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int i = 0; i < kSquare / kWarps; ++i) {
    const int column = i * kWarps + warp;
#pragma unroll
    for (int row = lane; row < kSquare; row += 32) {
      const bool is_there = c0 + column < copy.columns && r0 + row < copy.rows;
      square[column][row] = is_there ? from[(c0 + column) * copy.column_stride + r0 + row] : uint16_t(0);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSquare * kVectorsOfRow / kThreads; ++i) {
    const int place = i * kThreads + static_cast<int>(threadIdx.x);
    const int row = place / kVectorsOfRow, column = place % kVectorsOfRow * kVector;
    if (r0 + row >= copy.rows || c0 + column >= copy.filled) continue;
    Vector vector;
#pragma unroll
    for (int j = 0; j < kVector; ++j) vector.at[j] = square[column + j][row];
    store_by(job.store_bytes, to + (r0 + row) * copy.to_stride + c0 + column,
             at_most_a_vector(copy.filled - c0 - column), vector);
  }
}

__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const __grid_constant__ Job first, const __grid_constant__ Job second) {
  cuda::let_dependents_start();
  const bool is_first = blockIdx.x < first.blocks;
  const Job& job = is_first ? first : second;
  const int64_t block = is_first ? blockIdx.x : blockIdx.x - first.blocks;
  switch (job.way) {
    case Way::Rows:
      return copy_rows(job, block);
    case Way::OneRow:
      return copy_one_row(job, block);
    default:
      return copy_turned(job, block);
  }
}

// The widest access that fits all vectors of rows.
int bytes_of_access(const void* data, int64_t rows, int64_t stride) {
  const uint64_t bits = reinterpret_cast<uint64_t>(data) | (rows > 1 ? 2 * static_cast<uint64_t>(stride) : 0);
  return static_cast<int>(std::min<uint64_t>(bits & (~bits + 1), 2 * kVector));
}

unsigned blocks_for(int64_t vectors) {
  return static_cast<unsigned>((vectors + kThreads * kEach - 1) / (kThreads * kEach));
}

Job job_of(const RowsCopy& copy) {
  const auto squares = [](int64_t length) { return (length + kSquare - 1) / kSquare; };
  Job job{copy, Way::Rows, bytes_of_access(copy.from, copy.rows, copy.row_stride),
          bytes_of_access(copy.to, copy.rows, copy.to_stride), 0};
  if (copy.column_stride != 1) {
    job.way = Way::Turned;
    job.blocks = static_cast<unsigned>(squares(copy.rows) * squares(copy.filled));
  } else if (copy.to_stride == copy.columns && copy.filled == copy.columns && job.store_bytes < 2 * kVector) {
    job.way = Way::OneRow;
    job.store_bytes = bytes_of_access(copy.to, 1, 0);
    job.blocks = blocks_for((copy.rows * copy.columns + kVector - 1) / kVector);
  } else {
    job.blocks = blocks_for(copy.rows * ((copy.filled + kVector - 1) / kVector));
  }
  return job;
}

}  // namespace

const char* copy_rows_cuda(const RowsCopy& first, const RowsCopy* second, int device, void* stream) {
  Job jobs[] = {job_of(first), second ? job_of(*second) : Job{}};
  const cuda::LaunchShape shape{dim3(jobs[0].blocks + jobs[1].blocks),
                                dim3(kThreads),
                                /*cluster=*/dim3(1),
                                /*shared_bytes=*/0,
                                device,
                                stream,
                                /*dependent=*/false};
  void* parameters[] = {&jobs[0], &jobs[1]};
  return cuda::launch<&copy_rows_kernel>(shape, parameters);
}

}  // namespace epigemm
