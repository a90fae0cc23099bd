// Launching a kernel of kernel.cuh.
#pragma once

#include <algorithm>

#include "device/launch.h"
#include "gemm/grid.h"
#include "gemm/operands.h"
#include "gemm/problem.h"
#include "gemm/sm90/coverage.h"
#include "gemm/sm90/kernel.cuh"
#include "gemm/sm90/tensor_map.h"

namespace epigemm::sm90 {

// x or the weight, in the form that the kernel reads.
struct Multiplied {
  const void* data;
  int64_t row_stride;            // elements
  const float* roots = nullptr;  // if the sums have roots
  bool is_root_shared = false;   // by all rows
};

// The parameters of a pair's mainloop, for m rows of x and n of each weight (pair_mainloop.cuh). False if the driver
// refuses.
template <class Mainloop>
bool encode_pair(typename Mainloop::Params* params, Multiplied x, Multiplied weight, Multiplied weight2, int m, int n,
                 int k) {
  using Element = typename Mainloop::Element;
  const auto encode = [&](CUtensorMap* map, Multiplied of, int rows, int box_rows) {
    return sm90::encode(map, kMapType<Element>, sizeof(Element), of.data, of.row_stride, rows, k, box_rows,
                        kStageRowBytes, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  };
  return encode(&params->x, x, m, Mainloop::kRows) && encode(&params->weights[0], weight, n, Mainloop::kColumns) &&
         encode(&params->weights[1], weight2, n, Mainloop::kColumns);
}

// The parameters of the mainloop of rows in groups (grouped_mainloop.cuh). False if the driver refuses.
template <class Types>
bool encode_groups(typename Kernel<Types>::Mainloop::Params* params, Problem const& problem) {
  using Mainloop = typename Kernel<Types>::Mainloop;
  using Element = typename Types::Element;
  constexpr auto kType = kMapType<Element>;
  constexpr int kBytes = sizeof(Element);
  const int64_t count = problem.groups.count, apart = problem.groups.weight_stride;
  const auto encode = [&](CUtensorMap* map, const void* data, int64_t row_stride, int64_t rows, int box_rows) {
    return sm90::encode(map, kType, kBytes, data, row_stride, rows, problem.k, box_rows, kStageRowBytes,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  };
  const auto encode_weight = [&](CUtensorMap* map, const void* data) {
    if constexpr (Types::kIsWeightTransposed) {
      return encode_several(map, kType, kBytes, data, problem.weight.column_stride, problem.k, problem.n, apart, count,
                            Mainloop::kStageElements);
    } else {
      const int64_t row_stride = problem.weight.row_stride;
      params->weight_rows = static_cast<int>(apart / row_stride);
      return encode(map, data, row_stride, (count - 1) * params->weight_rows + problem.n, Mainloop::kRowsOfWeight);
    }
  };
  const void* const weights[] = {problem.weight.data, problem.weight2};
  bool is_encoded = encode(&params->x, problem.x.data, problem.x.row_stride, problem.m, Mainloop::kBoxRowsOfX);
  for (int i = 0; i < Mainloop::kWeights; ++i) is_encoded &= encode_weight(&params->weights[i], weights[i]);
  return is_encoded;
}

constexpr const char* kNoDescriptor = "the driver refused a TMA descriptor";

// By which sums are divided, if they have roots: of the kernel's rows and columns.
struct Roots {
  const float *row_roots = nullptr, *column_roots = nullptr;
  const float* found_roots = nullptr;  // of rows, where tiles are computed again (kernel.cuh)
  bool is_row_root_shared = false, is_column_root_shared = false;
};

template <class Types>
const char* launch_encoded(Problem const& problem, Plan const& plan,
                           typename Kernel<Types>::Mainloop::Params const& mainloop, Roots const& roots, int64_t k,
                           const void* kernel);

// `k`: elements of both that are multiplied. `kernel`: the one of these types with an epilogue in it, a cudaKernel_t;
// it reads nothing before the kernel ahead is done. `weight2`: of a pair. Returns nullptr, or what was refused and why.
template <class Types>
const char* launch(Problem const& problem, Plan const& plan, Multiplied x, Multiplied weight, int64_t k,
                   const void* kernel, Multiplied weight2 = {}) {
  using Kernel = sm90::Kernel<Types>;
  constexpr bool kTransposed = Types::tile.transposed;
  Multiplied const &a = kTransposed ? weight : x, &b = kTransposed ? x : weight;
  const int m = static_cast<int>(problem.m), n = static_cast<int>(problem.n);
  const int rows = kTransposed ? n : m, columns = kTransposed ? m : n;
  typename Kernel::Mainloop::Params mainloop;
  if constexpr (Types::kIsGrouped) {
    if (!encode_groups<Types>(&mainloop, problem)) return kNoDescriptor;
  } else if constexpr (Types::kWeights == 2) {
    if (!encode_pair<typename Kernel::Mainloop>(&mainloop, x, weight, weight2, m, n, static_cast<int>(k))) {
      return kNoDescriptor;
    }
  } else {
    using Arguments = typename Kernel::Mainloop::Arguments;  // the operands of 8 bits may have two types
    mainloop = Kernel::Mainloop::to_underlying_arguments(cute::make_shape(rows, columns, static_cast<int>(k), 1),
                                                         {static_cast<decltype(Arguments::ptr_A)>(a.data),
                                                          {a.row_stride, cute::_1{}, 0},
                                                          static_cast<decltype(Arguments::ptr_B)>(b.data),
                                                          {b.row_stride, cute::_1{}, 0}},
                                                         /*workspace=*/nullptr);
  }
  if constexpr (Types::kHasBlockScales) mainloop.factors = {problem.x_scale, problem.weight_scale, m, n};
  const Roots roots{a.roots, b.roots, /*found_roots=*/nullptr, a.is_root_shared, b.is_root_shared};
  return launch_encoded<Types>(problem, plan, mainloop, roots, k, kernel);
}

// The same behind the mainloop's parameters.
template <class Types>
const char* launch_encoded(Problem const& problem, Plan const& plan,
                           typename Kernel<Types>::Mainloop::Params const& mainloop, Roots const& roots, int64_t k,
                           const void* kernel) {
  using Kernel = sm90::Kernel<Types>;
  using Element = typename Types::Element;
  using Epilogue = typename Kernel::Epilogue;
  using Output = typename Types::Output;
  constexpr bool kTransposed = Types::tile.transposed;
  const int m = static_cast<int>(problem.m), n = static_cast<int>(problem.n);
  const int rows = kTransposed ? n : m, columns = kTransposed ? m : n;
  typename Kernel::Params params;
  params.mainloop = mainloop;
  EpilogueParams& epilogue = params.epilogue;
  const Matrix matrix = matrix_by_tma(problem);
  constexpr int kBoxRows = kTransposed ? Epilogue::kPassColumns : kPassRows;
  const auto encode = [&](CUtensorMap* map, Matrix const& of) {
    return sm90::encode(map, kMapType<Output>, sizeof(Output), of.data, of.row_stride, m, n, kBoxRows,
                        Epilogue::kRowBytes);
  };
  const auto encode_out = [&] {
    if (!Types::kIsGrouped) return encode(&epilogue.out, problem.out);
    return encode_grouped(&epilogue.out, kMapType<Output>, sizeof(Output), problem.out.data, problem.out.row_stride, n,
                          kBoxRows, Epilogue::kRowBytes);
  };
  if (!encode_out() || (matrix.data && !encode(&epilogue.matrix, matrix)) ||
      (problem.stored.data && !encode(&params.stored, problem.stored))) {
    return kNoDescriptor;
  }
  epilogue.operands = operands_of(problem);
  epilogue.column_moments = static_cast<BlockMoments<float>*>(problem.column_blocks);
  epilogue.row_roots = roots.row_roots, epilogue.column_roots = roots.column_roots;
  epilogue.found_roots = roots.found_roots;
  epilogue.row_root_step = !roots.is_row_root_shared, epilogue.column_root_step = !roots.is_column_root_shared;
  if constexpr (Epilogue::kIsQuantised) params.epilogue.out_scale = problem.out_scale;
  epilogue.rows = rows, epilogue.columns = columns, epilogue.is_matrix_by_tma = matrix.data != nullptr;
  params.k = static_cast<int>(k);
  params.k_steps = static_cast<int>(ceil_div(k * static_cast<int64_t>(sizeof(Element)), kStageRowBytes));
  params.lines_of_rows = static_cast<int>(ceil_div(rows, Kernel::kRows * Kernel::kClusterRows));
  params.lines_of_columns = static_cast<int>(ceil_div(columns, Kernel::kColumns * Kernel::kClusterColumns));
  params.swizzle = plan.swizzle;
  params.is_along_rows = (plan.raster == Raster::AlongM) != kTransposed;  // the plan's axes are D's

  int64_t tiles = static_cast<int64_t>(params.lines_of_rows) * params.lines_of_columns;
  if constexpr (Types::kIsGrouped) {
    const int64_t across = kTransposed ? params.lines_of_rows : params.lines_of_columns;
    tiles = across * (problem.m / (Types::tile.m * Types::tile.cluster_m) + std::min(problem.groups.count, problem.m));
    params.groups = {problem.groups.are_alike ? nullptr : problem.groups.ends, static_cast<int>(problem.groups.count),
                     static_cast<int>(problem.m / problem.groups.count)};
  }
  const int64_t places = std::max(1, problem.device.multiprocessors / Kernel::kCluster);
  auto clusters = static_cast<unsigned>(std::min(places, tiles));
  unsigned cluster_rows = Kernel::kClusterRows;
  if constexpr (Types::kSharesK) {
    params.sharing.ctas = plan.splits;
    if (plan.splits > 1) clusters = static_cast<unsigned>(tiles), cluster_rows = static_cast<unsigned>(plan.splits);
  }
  const cuda::LaunchShape shape{dim3(clusters * cluster_rows, Kernel::kClusterColumns),
                                dim3(Kernel::MaxThreadsPerBlock),
                                dim3(cluster_rows, Kernel::kClusterColumns),
                                Kernel::kSharedBytes,
                                problem.device.index,
                                problem.stream,
                                /*dependent=*/true};
  if (const char* const refused = cuda::allow(kernel, shape.device, shape.shared_bytes, sizeof params)) return refused;
  void* parameters[] = {&params};
  return cuda::launch(kernel, shape, parameters);
}

}  // namespace epigemm::sm90
