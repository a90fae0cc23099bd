// Both operands on their way to registers: through a ring of stages in shared memory.
#pragma once

#include "cute/arch/copy_sm75.hpp"
#include "gemm/sm80_mma/config.cuh"

namespace epigemm::sm80_mma {

// A CTA's part of K, in elements of a row.
struct ShareOfK {
  int first, length;
};

template <class Config>
struct Ring {
  using Element = typename Config::Element;
  static constexpr bool kIsByVectors = Config::tile.loads == Loads::Vectors;

  typename Config::LoaderOfX of_x;
  typename Config::LoaderOfWeight of_weight;
  Element *x, *weight;  // in shared memory
  int left;             // columns of the CTA's share of K that have not been loaded

  __device__ __forceinline__ Ring(Arguments const& p, int m0, int n0, ShareOfK const& k, Element* shared)
      : of_x(p.x, m0, p.m, k.first),
        of_weight(p.weight, n0, p.n, k.first),
        x(shared),
        weight(shared + Config::tile.stages * Config::tile.m * Config::tile.k),
        left(k.length) {}

  // Begins a stage, and has it stored: by elements only then. Nothing where K has ended.
  __device__ __forceinline__ void begin(int stage) {
    if constexpr (kIsByVectors) {
      if (left > 0) of_x.start(x, stage, left), of_weight.start(weight, stage, left);
      cute::cp_async_fence();
    } else if (left > 0) {
      of_x.fetch(left), of_weight.fetch(left);
    }
    left -= Config::tile.k;
  }
  __device__ __forceinline__ void finish(int stage) {
    if constexpr (!kIsByVectors) {
      if (left > -Config::tile.k) of_x.put(x, stage), of_weight.put(weight, stage);
    }
  }

  // Begins the first stages, all but one.
  __device__ __forceinline__ void fill() {
    for (int stage = 0; stage < Config::tile.stages - 1; ++stage) {
      begin(stage);
      finish(stage);
    }
  }

  // Whether all stages of K that were begun so far, but those ahead of the one at hand, are all that there are.
  __device__ __forceinline__ bool is_at_last() const { return left <= -Config::tile.k * (Config::tile.stages - 1); }

  // The stage that is read after this one, and the one that is free while this one is read.
  static __device__ __forceinline__ int next(int stage) { return stage + 1 == Config::tile.stages ? 0 : stage + 1; }
  static __device__ __forceinline__ int free(int stage) { return stage == 0 ? Config::tile.stages - 1 : stage - 1; }

  // Until the first of the stages that are on their way is there for all threads, and all threads are here. `kBegun`:
  // how many are on their way.
  template <int kBegun = Config::tile.stages - 1>
  __device__ __forceinline__ void wait() {
    if constexpr (kIsByVectors) cute::cp_async_wait<kBegun - 1>();
    __syncthreads();
  }
};

// Calls use(mma, of_x, of_weight, read_x, read_weight): the fragments of a whole stage, (values, rows, parts of K), and
// the functions that fill them by ldmatrix: read(rows, part, stage) reads a fragment's rows of one part of a stage, all
// rows where `rows` is an underscore. Read by ldmatrix.x4, a fragment of the weight has 16 rows at least.
template <class Config, class Use>
__device__ __forceinline__ void with_fragments(Ring<Config>& ring, Use use) {
  using namespace cute;
  using Element = typename Config::Element;
  typename Config::TiledMma mma;
  auto const thread_mma = mma.get_slice(threadIdx.x);
  Tensor x = make_tensor(make_smem_ptr(ring.x), typename Config::template Stages<Config::tile.m>{});
  Tensor weight = make_tensor(make_smem_ptr(ring.weight), typename Config::template Stages<Config::tile.n>{});
  Tensor of_x = thread_mma.partition_fragment_A(x(_, _, 0));
  Tensor of_weight = thread_mma.partition_fragment_B(weight(_, _, 0));
  using Copy = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
  auto const copy_x = make_tiled_copy_A(Copy{}, mma);
  auto const copy_weight = make_tiled_copy_B(Copy{}, mma);
  Tensor x_from = copy_x.get_slice(threadIdx.x).partition_S(x);
  Tensor weight_from = copy_weight.get_slice(threadIdx.x).partition_S(weight);
  Tensor x_to = copy_x.get_slice(threadIdx.x).retile_D(of_x);
  Tensor weight_to = copy_weight.get_slice(threadIdx.x).retile_D(of_weight);
  const auto read_x = [&](auto rows, int part, int stage) {
    copy(copy_x, x_from(_, rows, part, stage), x_to(_, rows, part));
  };
  const auto read_weight = [&](auto rows, int part, int stage) {
    copy(copy_weight, weight_from(_, rows, part, stage), weight_to(_, rows, part));
  };
  use(mma, of_x, of_weight, read_x, read_weight);
}

}  // namespace epigemm::sm80_mma
