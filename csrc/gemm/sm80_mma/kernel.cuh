// The mma.sync kernel: D = epilogue(x @ weight^T) on every GPU since Ampere.
//
// - A CTA has one tile of D. Its warps load by cp.async, a ring of stages ahead, and multiply by mma.sync from
//   registers, which ldmatrix fills one step of K ahead.
// - K is not split, and every sum is made in the order of K: the same bits whatever M is.
// - fp32 operands are copied as they are, and rounded to TF32 in registers.
// - The sums leave through shared memory, a few rows at a time. A thread then has 16 bytes of a row: it reads the
//   epilogue's operands by as much, and stores it.
#pragma once

#include "cute/arch/copy_sm75.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cute/tensor.hpp"
#include "device/types.cuh"
#include "gemm/sm80_mma/loads.cuh"
#include "open/epilogue.cuh"

namespace epigemm::sm80_mma {

// The element as the tensor cores multiply it, and the instruction. Sums are fp32.
template <class Stored>
struct Multiplied;
template <>
struct Multiplied<__half> {
  using Type = cutlass::half_t;
  using Instruction = cute::SM80_16x8x16_F32F16F16F32_TN;
};
template <>
struct Multiplied<__nv_bfloat16> {
  using Type = cutlass::bfloat16_t;
  using Instruction = cute::SM80_16x8x16_F32BF16BF16F32_TN;
};
template <>
struct Multiplied<float> {
  using Type = cutlass::tfloat32_t;
  using Instruction = cute::SM80_16x8x8_F32TF32TF32F32_TN;
};

template <class Stored, int TileIndex>
struct TileOf {
  static constexpr Tile tile = tile_of(sizeof(Stored), TileIndex);
};

template <class Stored_, int TileIndex>
struct Config {
  using Stored = Stored_;
  using Element = typename Multiplied<Stored>::Type;
  using OfTile = TileOf<Stored, TileIndex>;
  static constexpr Tile tile = OfTile::tile;
  static constexpr int kVector = tile.vector();

  // Warps take turns along both axes, 16 rows and 16 columns at a time.
  using TiledMma = decltype(cute::make_tiled_mma(
      typename Multiplied<Stored>::Instruction{},
      cute::Layout<cute::Shape<cute::Int<tile.warps_m>, cute::Int<tile.warps_n>, cute::_1>>{},
      cute::Tile<cute::Int<kInstruction * tile.warps_m>, cute::Int<kInstruction * tile.warps_n>,
                 cute::Int<tile.instruction_k()>>{}));

  // The eight rows that ldmatrix reads at once lie in different banks.
  static constexpr int kSwizzle = tile.row_bytes() == 128 ? 3 : 2;
  static_assert(tile.row_bytes() == 128 || tile.row_bytes() == 64);
  static constexpr int kVectorBits = kVector == 8 ? 3 : 2;
  using Swizzled = decltype(cute::composition(
      cute::Swizzle<kSwizzle, kVectorBits, 3>{},
      cute::Layout<cute::Shape<cute::_8, cute::Int<tile.k>>, cute::Stride<cute::Int<tile.k>, cute::_1>>{}));
  template <int Rows>
  using Stages = decltype(cute::tile_to_shape(
      Swizzled{}, cute::Shape<cute::Int<Rows>, cute::Int<tile.k>, cute::Int<tile.stages>>{}));

  using LoaderOfX = Loader<Element, OfTile, tile.m, Stages<tile.m>>;
  using LoaderOfWeight = Loader<Element, OfTile, tile.n, Stages<tile.n>>;
};

// A CTA's tile of D, by its number.
struct Place {
  int m, n;
};

__device__ __forceinline__ Place place_of(Order const& order, int number) {
  const int strip = number / (order.width * order.walked);
  const int width = min(order.width, order.across - strip * order.width);
  const int within = number - strip * order.width * order.walked;
  const int walked = within / width, across = strip * order.width + within % width;
  return order.is_along_m ? Place{walked, across} : Place{across, walked};
}

// --- multiplying ---------------------------------------------------------------------------------------------------

// Both operands on their way to shared memory.
template <class Config>
struct Ring {
  using Element = typename Config::Element;
  static constexpr bool kIsByVectors = Config::tile.loads == Loads::Vectors;

  typename Config::LoaderOfX of_x;
  typename Config::LoaderOfWeight of_weight;
  Element *x, *weight;  // in shared memory

  __device__ __forceinline__ Ring(Arguments const& p, int m0, int n0, Element* shared)
      : of_x(p.x, m0, p.m, p.k),
        of_weight(p.weight, n0, p.n, p.k),
        x(shared),
        weight(shared + Config::tile.stages * Config::tile.m * Config::tile.k) {}

  // Begins a stage, and has it stored: by elements only then. Nothing where K has ended.
  __device__ __forceinline__ void begin(int stage, bool is_left) {
    if constexpr (kIsByVectors) {
      if (is_left) of_x.start(x, stage), of_weight.start(weight, stage);
      cute::cp_async_fence();
    } else if (is_left) {
      of_x.fetch(), of_weight.fetch();
    }
  }
  __device__ __forceinline__ void finish(int stage, bool is_left) {
    if constexpr (!kIsByVectors) {
      if (is_left) of_x.put(x, stage), of_weight.put(weight, stage);
    }
  }

  // Until the stage behind the one at hand is there for all threads, and all have read the one at hand.
  __device__ __forceinline__ void wait() {
    if constexpr (kIsByVectors) cute::cp_async_wait<Config::tile.stages - 2>();
    __syncthreads();
  }
};

// To the nearest TF32, ties away from zero: what the instruction leaves of an fp32 number else is cut off.
__device__ __forceinline__ uint32_t rounded_to_tf32(uint32_t bits) {
#ifdef __CUDA_ARCH__
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
#else  // under a C++ compiler
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return is_nan ? 0x7fffffffu : (bits + 0x1000u) & 0xffffe000u;
#endif
}

template <class Fragment>
__device__ __forceinline__ void round_fragment(Fragment&& fragment) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < cute::size(fragment); ++i) {
    auto& bits = reinterpret_cast<uint32_t&>(fragment(i));
    bits = rounded_to_tf32(bits);
  }
}

// The sums of the whole K.
template <class Config, class Sums>
__device__ __forceinline__ void multiply(Ring<Config>& ring, int k, Sums& sums) {
  using namespace cute;
  using Element = typename Config::Element;
  constexpr int kStages = Config::tile.stages;
  const int steps = (k + Config::tile.k - 1) / Config::tile.k;
  for (int stage = 0; stage < kStages - 1; ++stage) {
    ring.begin(stage, stage < steps);
    ring.finish(stage, stage < steps);
  }

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

  constexpr int kParts = size<2>(decltype(of_x){});  // of a stage: one instruction's K each
  static_assert(kParts > 1, "one is read while another is multiplied");
  const auto read = [&](int part, int stage) {
    copy(copy_x, x_from(_, _, part, stage), x_to(_, _, part));
    copy(copy_weight, weight_from(_, _, part, stage), weight_to(_, _, part));
  };

  int reading = 0, writing = kStages - 1;
  clear(sums);
  ring.wait();
  read(0, reading);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int step = 0; step < steps; ++step) {
    const bool is_left = step + kStages - 1 < steps;
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < kParts; ++part) {
      if (part == kParts - 1) {
        ring.finish(writing, is_left);
        ring.wait();
        writing = reading;
        reading = reading + 1 == kStages ? 0 : reading + 1;
      }
      read((part + 1) % kParts, reading);
      if (part == 0) ring.begin(writing, is_left);
      if constexpr (sizeof(Element) == 4) {
        round_fragment(of_x(_, _, part));
        round_fragment(of_weight(_, _, part));
      }
      gemm(mma, of_x(_, _, part), of_weight(_, _, part), sums);
    }
  }
  if constexpr (Ring<Config>::kIsByVectors) cp_async_wait<0>();
}

// --- finishing -----------------------------------------------------------------------------------------------------

// Which results of a pass a thread finishes: 16 bytes of neighbours of some rows, always in the same columns.
template <class Config>
struct Share {
  static constexpr int kVector = Config::kVector;
  static constexpr int kVectorsOfRow = Config::tile.n / kVector;
  static constexpr int kStep = Config::tile.threads() / kVectorsOfRow;  // rows
  static constexpr int kRows = Config::tile.pass_rows() / kStep;
  static_assert(Config::tile.pass_rows() % kStep == 0, "every thread finishes as much");

  __device__ __forceinline__ int column() const { return static_cast<int>(threadIdx.x) % kVectorsOfRow * kVector; }
  __device__ __forceinline__ int row(int i) const { return static_cast<int>(threadIdx.x) / kVectorsOfRow + i * kStep; }
};

// `count`: how many of the neighbours exist.
template <class Config, class Stored>
__device__ __forceinline__ void store(Stored* out, float const (&results)[Config::kVector], int64_t count) {
  constexpr int kVector = Config::kVector;
  uint32_t words[kVectorBytes / 4];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kVectorBytes / 4; ++i) {
    if constexpr (sizeof(Stored) == 4) {
      words[i] = reinterpret_cast<uint32_t const&>(results[i]);
    } else {
      Stored pair[2];
      cuda::from_compute_pair<Stored>(results + 2 * i, pair);
      words[i] = reinterpret_cast<uint32_t const&>(pair);
    }
  }
  const bool is_aligned = Config::tile.loads == Loads::Vectors || reinterpret_cast<uintptr_t>(out) % sizeof(words) == 0;
  if (is_aligned && count >= kVector) {
    *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) {
      if (i < count) out[i] = reinterpret_cast<Stored const*>(words)[i];
    }
  }
}

// One pass: a part of the sums to `shared`, and from there through the epilogue to D. `row0`: of D, the pass's first.
template <class Config, class Epilogue, class Sums>
__device__ __forceinline__ void finish_pass(Arguments const& p, Epilogue const& epilogue, Sums const& sums,
                                            float* shared, int row0, int64_t column) {
  using namespace cute;
  using Stored = typename Config::Stored;
  constexpr Tile tile = Config::tile;
  constexpr int kVector = Config::kVector;
  const Share<Config> share;
  const int rows = p.m - row0;
  typename Epilogue::Row of_rows[Share<Config>::kRows];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Share<Config>::kRows; ++i) {
    if (share.row(i) < rows) of_rows[i] = epilogue.row(row0 + share.row(i));
  }

  const auto shape = Shape<Int<tile.pass_rows()>, Int<tile.n>>{};
  Tensor places = typename Config::TiledMma{}.get_slice(threadIdx.x).partition_C(make_identity_tensor(shape));
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(sums); i += 2) {  // two neighbours of a row
    float* const to = shared + get<0>(places(i)) * tile.sums_stride() + get<1>(places(i));
    *reinterpret_cast<float2*>(to) = make_float2(sums(i), sums(i + 1));
  }
  __syncthreads();
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Share<Config>::kRows; ++i) {
    const int row = share.row(i);
    if (row >= rows || column >= p.n) continue;
    const float* const from = shared + row * tile.sums_stride() + share.column();
    float of_row[kVector], results[kVector];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kVector / 4; ++j) {
      const float4 four = reinterpret_cast<const float4*>(from)[j];
      of_row[4 * j] = four.x, of_row[4 * j + 1] = four.y, of_row[4 * j + 2] = four.z, of_row[4 * j + 3] = four.w;
    }
    epilogue.apply(of_row, of_rows[i], results);
    store<Config>(static_cast<Stored*>(p.out) + (row0 + row) * p.out_row_stride + column, results, p.n - column);
  }
}

// --- the kernel ----------------------------------------------------------------------------------------------------

// Grid: a CTA a tile.
template <class Config>
__device__ __forceinline__ void run(Arguments const& p) {
  using namespace cute;
  using Epilogue = open::Epilogue<typename Config::Stored, Config::kVector, open::Access::Unknown>;
  constexpr Tile tile = Config::tile;
  extern __shared__ __align__(128) char memory[];
  const Place place = place_of(p.order, blockIdx.x);
  const int m0 = place.m * tile.m, n0 = place.n * tile.n;
  Tensor sums = partition_fragment_C(typename Config::TiledMma{}, Shape<Int<tile.m>, Int<tile.n>>{});
  Ring<Config> ring(p, m0, n0, reinterpret_cast<typename Config::Element*>(memory));
  multiply<Config>(ring, p.k, sums);

  __syncthreads();  // all stages have been read
  const int64_t column = n0 + Share<Config>{}.column();
  const Epilogue epilogue(p.operands, column < p.n ? column : 0, p.n);
  auto* const shared = reinterpret_cast<float*>(memory);
  CUTLASS_PRAGMA_UNROLL
  for (int pass = 0; pass < size<1>(sums); ++pass) {
    // Where a pass is written, the one before the last has been read: a barrier of the last one's lies between.
    float* const of_pass = shared + pass % 2 * (tile.pass_bytes() / 4);
    finish_pass<Config>(p, epilogue, sums(_, pass, _), of_pass, m0 + pass * tile.pass_rows(), column);
  }
}

}  // namespace epigemm::sm80_mma
