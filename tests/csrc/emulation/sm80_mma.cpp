// The mma.sync kernels' own source on the CPU: problems of tiles of every kind against sums in double.
//
// Arguments: operand, tile, M, N, K, elements before each matrix, elements behind each row, CTAs that share the K of a
// tile, and the most CTAs along the tiles. Prints the largest error in units of its bound, and exits with 1 where that
// is above 1 or something beside D was written. The operands split and scaled are fp32 matrices, which the program
// splits into fp16 slices.
#include "emulation/warps.h"

#include "open/contract.h"

#define EPIGEMM_SLOTS(T) T c0, T c1, T c2, T c3, T s0, T s1, T s2, T s3, T r0, T r1, T m0, T m1

using std::min;

// One functor that reads a slot of every kind, of both element types.
extern "C" int epigemm_operand(int slot) {
  using namespace epigemm::open;
  if (slot == kColumn0 || slot == kMatrix0) return kOfElement;
  return slot == kColumn0 + 1 || slot == kScalar0 || slot == kRow0 || slot == kMatrix0 + 1 ? kOfCompute : kUnread;
}
constexpr int kRowsEach = 3;  // of D, for a row of the matrix that shares rows
extern "C" bool epigemm_shares_rows(int slot) { return slot == epigemm::open::kMatrix0 + 1; }
extern "C" float epigemm_apply(float acc, EPIGEMM_SLOTS(float)) { return (acc + c0) * c1 + s0 * r0 + m0 - m1; }
extern "C" float epigemm_apply_near(float acc, EPIGEMM_SLOTS(float), bool& is_far) {
  // Beyond 1 this has no meaning: the kernel must take the result of epigemm_apply.
  is_far |= acc > 1.0f;
  return acc > 1.0f ? -1e30f : epigemm_apply(acc, c0, c1, c2, c3, s0, s1, s2, s3, r0, r1, m0, m1);
}
extern "C" bool epigemm_has_far() { return true; }
extern "C" void epigemm_apply_four(const float*, const float*, float*) {}
extern "C" void epigemm_apply_near_four(const float*, const float*, float*, bool&) {}
extern "C" bool epigemm_has_store() { return false; }
extern "C" float epigemm_store(float, EPIGEMM_SLOTS(float)) { return 0; }
extern "C" float epigemm_store_near(float, EPIGEMM_SLOTS(float), bool&) { return 0; }
extern "C" bool epigemm_has_far_store() { return false; }
extern "C" double epigemm_apply_double(double, EPIGEMM_SLOTS(double)) { return 0; }
extern "C" float epigemm_slope(float, EPIGEMM_SLOTS(float), int) { return 0; }
extern "C" double epigemm_slope_double(double, EPIGEMM_SLOTS(double), int) { return 0; }

namespace epigemm::sm80_mma {
alignas(128) char memory[256 * 1024];
}

#include "gemm/fp16_slices/slices.h"
#include "gemm/sm80_mma/kernel.cuh"

namespace {

using namespace epigemm;
using namespace epigemm::sm80_mma;

struct Sizes {
  int m, n, k, before, behind, splits, most;
};

// Small whole numbers and halves: most sums are exact, and a wrong element shows.
float drawn(uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(static_cast<int>(state >> 24) % 17 - 8) / 4;
}

// Ties away from zero.
double nearest_tf32(double value) {
  int exponent = 0;
  std::frexp(value, &exponent);
  return std::ldexp(std::round(std::ldexp(value, 11 - exponent)), exponent - 11);
}

template <class T>
struct Drawn {
  std::vector<T> all;
  int64_t stride;
  int before;
  const T* data() const { return all.data() + before; }
  T* data() { return all.data() + before; }
  double at(int i, int j) const { return static_cast<float>(all[before + i * stride + j]); }
};

// What the kernel multiplies of an operand.
template <class Config, class T>
double multiplied_at(const Drawn<T>& matrix, int i, int j) {
  return Config::inputs == Inputs::TF32 ? nearest_tf32(matrix.at(i, j)) : matrix.at(i, j);
}

template <class T>
inline const T kPoison = T(-12345.f);

template <class T>
Drawn<T> draw(int rows, int columns, const Sizes& sizes, uint32_t& state, bool is_poisoned = false) {
  Drawn<T> made{{}, columns + sizes.behind, sizes.before};
  made.all.assign(sizes.before + rows * made.stride + 16, T(std::nanf("")));
  if (is_poisoned) std::fill(made.all.begin(), made.all.end(), kPoison<T>);
  for (int i = 0; i < rows && !is_poisoned; ++i) {
    for (int j = 0; j < columns; ++j) {
      float value = drawn(state);
      // Of fp32 also what lies between two numbers of TF32, and halfway between them.
      if (sizeof(T) == 4) value *= 1 + static_cast<float>(state >> 8 & 0x1fff) * 0x1p-13f / 1024;
      made.all[sizes.before + i * made.stride + j] = T(value);
    }
  }
  return made;
}

// A matrix in one or two fp16 slices, as fp16_slices/layout.h lays it out.
struct Sliced {
  std::vector<__half> all;
  std::vector<float> roots;
  int64_t stride;
};

Sliced sliced(const Drawn<float>& matrix, int rows, int columns, int slices) {
  using namespace fp16_slices;
  const int64_t padded = padded_columns(columns, slices);
  Sliced made{{}, {}, padded * slices};
  made.all.assign(rows * made.stride + 8, __half(0.f));
  for (int i = 0; i < rows; ++i) {
    float largest = 0;
    for (int k = 0; k < columns; ++k)
      largest = std::max(largest, finite_magnitude(matrix.data()[i * matrix.stride + k]));
    made.roots.push_back(row_root(row_exponent(largest)));
    for (int k = 0; k < columns; ++k) {
      const float s = scaled(matrix.data()[i * matrix.stride + k], row_scale(largest));
      const auto split = split_element<__half>(s, [](float x) { return __half(x); }, [](__half x) { return float(x); });
      made.all[i * made.stride + slice_offset(k, 0, slices)] = split.high;
      if (slices == kSlices) made.all[i * made.stride + slice_offset(k, 1, slices)] = split.low;
    }
  }
  return made;
}

template <class Config>
struct Given {
  Sliced of_matrix;
  Rows rows;
  int k;

  template <class T>
  Given(const Drawn<T>& matrix, int count, int columns) {
    if constexpr (Config::kIsOnSlices) {
      of_matrix = sliced(matrix, count, columns, Config::inputs == Inputs::Split ? 2 : 1);
      rows = {of_matrix.all.data(), of_matrix.stride, of_matrix.roots.data()};
      k = static_cast<int>(of_matrix.stride);
    } else {
      rows = {matrix.data(), matrix.stride};
      k = columns;
    }
  }
};

// Several CTAs to a tile, with a workspace that is full of NaNs.
class Divided {
 public:
  Divided(const Tile& tile, int tiles, int k, int splits)
      : tiles_(tiles),
        splits_(splits),
        units_((k + tile.slices * tile.k - 1) / (tile.slices * tile.k)),
        arrived_(tiles, 0),
        sums_(static_cast<std::size_t>(tiles) * splits * tile.m * tile.n + kFrame, std::nanf("")) {}

  Division division() {
    if (splits_ == 1) return {1, units_, 0};
    return {splits_, units_ / splits_, units_ % splits_, arrived_.data(), sums_.data()};
  }
  // In an order in which not always the CTA of the last share comes last.
  ThreadIndex place(int number) const {
    const int tile = number % tiles_, share = (number / tiles_ + tile) % splits_;
    return {static_cast<unsigned>(tile), static_cast<unsigned>(share)};
  }
  bool is_frame_whole() const {
    return std::all_of(sums_.end() - kFrame, sums_.end(), [](float each) { return std::isnan(each); });
  }

 private:
  static constexpr int kFrame = 64;
  int tiles_, splits_, units_;
  std::vector<int> arrived_;
  std::vector<float> sums_;
};

// Of one product, relative: of the rounding to the element's own type, or to that of the slices, once for each operand.
template <class Config>
constexpr double kOfProducts = Config::inputs == Inputs::Split    ? 0x1p-20
                               : Config::inputs == Inputs::Scaled ? 0x1p-10
                                                                  : 0x1p-18;

// Of D. Calls give a tile that loads by vectors rows of whole 16 bytes, also where its operands are slices of matrices
// that lie anywhere.
template <class Config>
Sizes sizes_of_result(Sizes sizes) {
  if (Config::tile.loads == Loads::Elements) return sizes;
  constexpr int kVector = kVectorBytes / sizeof(typename Config::Result);
  const auto rounded_up = [](int count) { return (count + kVector - 1) / kVector * kVector; };
  sizes.before = rounded_up(sizes.before);
  sizes.behind = rounded_up(sizes.n + sizes.behind) - sizes.n;
  return sizes;
}

template <class Config>
int check(const Sizes& sizes) {
  using Stored = typename Config::Result;
  constexpr Tile tile = Config::tile;
  const Sizes of_result = sizes_of_result<Config>(sizes);
  uint32_t state = 7;
  const auto x = draw<Stored>(sizes.m, sizes.k, sizes, state), weight = draw<Stored>(sizes.n, sizes.k, sizes, state);
  const auto column = draw<Stored>(1, sizes.n, sizes, state);
  const auto wide_column = draw<float>(1, sizes.n, sizes, state), row = draw<float>(1, sizes.m, sizes, state);
  const auto matrix = draw<Stored>(sizes.m, sizes.n, sizes, state);
  const auto wide_matrix = draw<float>((sizes.m + kRowsEach - 1) / kRowsEach, sizes.n, sizes, state);
  auto out = draw<Stored>(sizes.m, sizes.n, of_result, state, true);

  const int tiles_m = (sizes.m + tile.m - 1) / tile.m, tiles_n = (sizes.n + tile.n - 1) / tile.n;
  for (const Order order : {Order{true, tiles_m, tiles_n, std::min(2, tiles_n)}, Order{false, tiles_n, tiles_m, 1}}) {
    const Given<Config> given_x(x, sizes.m, sizes.k), given_weight(weight, sizes.n, sizes.k);
    Arguments p{};
    p.x = given_x.rows;
    p.weight = given_weight.rows;
    p.out = out.data();
    p.out_row_stride = out.stride;
    p.m = sizes.m, p.n = sizes.n, p.k = given_x.k;
    p.order = order;
    p.operands.data[open::kColumn0] = column.data();
    p.operands.data[open::kColumn0 + 1] = wide_column.data();
    p.operands.data[open::kRow0] = row.data();
    p.operands.data[open::kMatrix0] = matrix.data();
    p.operands.data[open::kMatrix0 + 1] = wide_matrix.data();
    p.operands.matrix_strides[0] = matrix.stride;
    p.operands.matrix_strides[1] = wide_matrix.stride;
    p.operands.shared_rows[1] = open::SharedRows::by(kRowsEach);
    p.operands.scalars[0] = 0.5f;
    std::fill(out.all.begin(), out.all.end(), kPoison<Stored>);
    Divided divided(tile, tiles_m * tiles_n, p.k, sizes.splits);
    p.division = divided.division();
    const int ctas = std::min(sizes.most, tiles_m * tiles_n);
    gridDim = {static_cast<unsigned>(ctas), static_cast<unsigned>(sizes.splits)};
    for (int number = 0; number < ctas * sizes.splits; ++number) {
      std::memset(memory, 0xff, sizeof memory);
      const auto [of_tile, share] = divided.place(number);
      emulation::run_cta(tile.threads(), {of_tile, share}, 37 * number % tile.threads(), [&] { run<Config>(p); });
      for (std::size_t i = tile.shared_bytes(); i < sizeof memory; ++i) {
        if (memory[i] != char(0xff)) return std::printf("writes beyond its shared memory\n"), 1;
      }
      if (sizes.splits > 1 && !divided.is_frame_whole()) return std::printf("writes beyond its workspace\n"), 1;
    }
    double worst = 0;
    auto expected_out = draw<Stored>(sizes.m, sizes.n, of_result, state, true);
    for (int i = 0; i < sizes.m; ++i) {
      for (int j = 0; j < sizes.n; ++j) {
        double sum = 0, magnitude = 0;
        for (int k = 0; k < sizes.k; ++k) {
          const double product = multiplied_at<Config>(x, i, k) * multiplied_at<Config>(weight, j, k);
          sum += product, magnitude += std::abs(product);
        }
        const double expected = (sum + column.at(0, j)) * wide_column.at(0, j) + 0.5 * row.at(0, i) + matrix.at(i, j) -
                                wide_matrix.at(i / kRowsEach, j);
        const double unit = sizeof(Stored) == 4 ? 0x1p-24 : std::is_same_v<Stored, __half> ? 0x1p-11 : 0x1p-8;
        const double bound = std::abs(expected) * unit * 1.01 + 0x1p-20 + kOfProducts<Config> * magnitude;
        const double error = std::abs(out.at(i, j) - expected) / bound;
        worst = error <= worst ? worst : error;  // a NaN is the worst
        expected_out.all[of_result.before + i * out.stride + j] = out.all[of_result.before + i * out.stride + j];
      }
    }
    if (std::memcmp(out.all.data(), expected_out.all.data(), out.all.size() * sizeof(Stored)) != 0) {
      return std::printf("writes beside D\n"), 1;
    }
    std::printf("%.3f\n", worst);
    if (!(worst <= 1)) return 1;
  }
  return 0;
}

// A tile of each kind, for the compiler takes five seconds over each: stages of 64 and 32 columns, warps side by side
// along either axis, both ways of loading. The types of 16 bits differ by an instruction alone.
template <class Operand, int... TileIndex>
int check_tile(int tile, const Sizes& sizes, std::integer_sequence<int, TileIndex...>) {
  int failed = 2;  // a tile that is not here
  ((TileIndex == tile ? void(failed = check<Config<Operand, TileIndex>>(sizes)) : void()), ...);
  return failed;
}

}  // namespace

int main(int, char** given) {
  const auto number = [&](int i) { return std::atoi(given[i]); };
  const Sizes sizes{number(3), number(4), number(5), number(6), number(7), number(8), number(9)};
  if (std::strcmp(given[1], "float16") == 0) {
    return check_tile<__half>(number(2), sizes, std::integer_sequence<int, 6, 9>{});
  }
  if (std::strcmp(given[1], "split") == 0)
    return check_tile<Split>(number(2), sizes, std::integer_sequence<int, 0, 1>{});
  if (std::strcmp(given[1], "scaled") == 0)
    return check_tile<Scaled>(number(2), sizes, std::integer_sequence<int, 2>{});
  if (std::strcmp(given[1], "tf32") == 0) {
    return check_tile<float>(number(2), sizes, std::integer_sequence<int, 0, 2>{});
  }
  return check_tile<__nv_bfloat16>(number(2), sizes, std::integer_sequence<int, 0, 3, 5, 7, 8>{});
}
