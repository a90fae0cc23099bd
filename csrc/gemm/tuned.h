// Choices that were measured: what dispatch takes before it asks its cost model. Plain C++, one table per CUDA device.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gemm/problem.h"

namespace epigemm::tuned {

// What a choice was measured for.
struct Key {
  EpilogueId epilogue = EpilogueId::bias;
  ElementType element = ElementType::Float16;
  Arithmetic arithmetic = Arithmetic::IEEE;
  bool packed = false;        // on fp16 pieces: the weight's are there already
  bool one_kernel = false;    // PyTorch's own path is a single kernel
  bool tf32_allowed = false;  // fp32: to PyTorch's GEMM
  int64_t n = 0, k = 0;
  int64_t m = 0;  // the edge of its bucket

  bool operator==(const Key& other) const;
};

// The best fused plan, and what was measured of it and of PyTorch's own path: the faster one runs.
struct Choice {
  Plan plan;
  double fused_microseconds = 0;
  double second_path_microseconds = 0;
  bool shipped = false;  // from the table that comes with the package, not measured on this very GPU

  bool fused() const { return fused_microseconds <= second_path_microseconds; }
};

using Row = std::pair<Key, Choice>;

constexpr int64_t kLargestBucket = 65536;

// The smallest edge that is not below m: 1, 2, 4, ... 64, from there on 96, 128, 192, 256 ... (powers of two and their
// midpoints: below 64 the kernels' rows are padded to powers of two anyway). Larger m fall into the last bucket.
int64_t bucket_edge(int64_t m);

constexpr int kMostDevices = 64;

// Adds rows to a device's table, by its index below kMostDevices; a row replaces the one of the same key. Safe beside
// lookups from other threads.
void load(int device, const std::vector<Row>& rows);
void clear(int device);

// Neither allocates nor takes a lock.
std::optional<Choice> find(int device, const Key& key);

// Changes whenever a plan's numbers may mean another kernel than before.
std::string tiles_fingerprint();

}  // namespace epigemm::tuned
