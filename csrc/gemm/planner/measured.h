// Measured choices, which the planner prefers to its cost models. A time is used for the M at which it was measured;
// for any other M the models decide. Plain C++, one table per CUDA device.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gemm/problem.h"

namespace epigemm::measured {

// The calls for which a choice was measured.
struct Key {
  std::string epilogue;                        // its name, because it may be made after its choices are loaded
  ElementType element = ElementType::Float16;  // of x, weight and out
  Arithmetic arithmetic = Arithmetic::IEEE;
  bool is_packed = false;
  bool has_one_kernel_fallback = false;
  bool is_tf32_allowed = false;
  Sizes sizes;

  bool operator==(const Key& other) const;
};

Key key_of(const Problem& problem);

// The best fused plan, and the measured times of it and of the fallback: the faster one runs.
struct Choice {
  Plan plan;
  double fused_microseconds = 0;
  double fallback_microseconds = 0;

  bool is_fused() const { return fused_microseconds <= fallback_microseconds; }
};

using Row = std::pair<Key, Choice>;

constexpr int kMostDevices = 64;

// Adds to the table of a device, by its index below kMostDevices; without rows, empties it. Of several rows with one
// key the last counts. Cached plans are dropped. Other threads may look up at the same time.
void load(int device, const std::vector<Row>& rows);

std::optional<Choice> find(int device, const Key& key);

// Changes whenever a plan's numbers may mean another kernel than before.
std::string tiles_fingerprint();

}  // namespace epigemm::measured
