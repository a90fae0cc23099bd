// epigemm::_load_tuned, _clear_tuned and _tuned_bucket: measured choices into dispatch's tables.
#include "gemm/tuned.h"

#include "gemm/dispatch.h"
#include "gemm/split/tiles.h"
#include "torch/plans.h"

namespace epigemm::binding {
namespace {

// What one row holds, in this order. The indices are those of the registry and of the two enumerations.
enum Column {
  kEpilogue,
  kElement,
  kArithmetic,
  kPacked,
  kHasBias,
  kTF32Allowed,
  kN,
  kK,
  kM,
  kTile,
  kRaster,
  kSwizzle,
  kSplits,
  kFusedNanoseconds,
  kSecondPathNanoseconds,
  kColumns,
};

bool on_pieces(Arithmetic arithmetic) { return arithmetic == Arithmetic::Split || arithmetic == Arithmetic::Scaled; }

tuned::Key key_of(const int64_t* row) {
  check(row[kEpilogue] >= 0 && row[kEpilogue] < kEpilogueCount, "rows: there is no epilogue ", row[kEpilogue]);
  check(row[kElement] >= 0 && row[kElement] <= 2, "rows: there is no fused kernel for element ", row[kElement]);
  check(row[kArithmetic] >= 0 && row[kArithmetic] <= 3, "rows: there is no arithmetic ", row[kArithmetic]);
  tuned::Key key;
  key.epilogue = epilogues()[row[kEpilogue]].id;
  key.element = static_cast<ElementType>(row[kElement]);
  key.arithmetic = static_cast<Arithmetic>(row[kArithmetic]);
  check(!on_pieces(key.arithmetic) || key.element == ElementType::Float32, "rows: only float32 runs on fp16 pieces");
  key.packed = on_pieces(key.arithmetic) && row[kPacked] != 0;
  key.one_kernel = second_path_is_one_kernel(key.epilogue, row[kHasBias] != 0);
  // A fused TF32 kernel stands against a TF32 GEMM.
  key.tf32_allowed = key.element == ElementType::Float32 && (row[kTF32Allowed] != 0 || !on_pieces(key.arithmetic));
  key.n = row[kN];
  key.k = row[kK];
  key.m = row[kM];
  check(key.n > 0 && key.k > 0 && key.m > 0 && key.m == tuned::bucket_edge(key.m),
        "rows: n, k and m must be positive and m the edge of a bucket, got ", key.n, ", ", key.k, ", ", key.m);
  return key;
}

tuned::Choice choice_of(const int64_t* row, const tuned::Key& key, bool shipped) {
  constexpr double kMicrosecond = 1e-3;
  check(row[kFusedNanoseconds] > 0 && row[kSecondPathNanoseconds] > 0, "rows: times must be positive");
  const int tiles = on_pieces(key.arithmetic) ? split::tile_count(key.arithmetic) : kTileCount;
  tuned::Choice choice;
  choice.plan = forced_plan({row + kTile, row + kSplits + 1}, tiles);
  choice.fused_microseconds = kMicrosecond * static_cast<double>(row[kFusedNanoseconds]);
  choice.second_path_microseconds = kMicrosecond * static_cast<double>(row[kSecondPathNanoseconds]);
  choice.shipped = shipped;
  return choice;
}

// Device -1: the rows are only checked.
void load_tuned(int64_t device, const std::vector<int64_t>& numbers, bool shipped) {
  check(device >= -1 && device < tuned::kMostDevices, "device must be the index of a CUDA device, got ", device);
  check(numbers.size() % kColumns == 0, "rows must hold ", static_cast<int>(kColumns), " numbers each, got ",
        numbers.size());
  std::vector<tuned::Row> rows;
  for (std::size_t start = 0; start < numbers.size(); start += kColumns) {
    const tuned::Key key = key_of(&numbers[start]);
    rows.emplace_back(key, choice_of(&numbers[start], key, shipped));
  }
  if (device >= 0) tuned::load(static_cast<int>(device), rows);
}

void clear_tuned(int64_t device) {
  check(device >= 0 && device < tuned::kMostDevices, "device must be the index of a CUDA device, got ", device);
  tuned::clear(static_cast<int>(device));
}

int64_t tuned_bucket(int64_t m) { return tuned::bucket_edge(m); }

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_load_tuned", TORCH_BOX(&epigemm::binding::load_tuned));
  m.impl("_clear_tuned", TORCH_BOX(&epigemm::binding::clear_tuned));
  m.impl("_tuned_bucket", TORCH_BOX(&epigemm::binding::tuned_bucket));
}
