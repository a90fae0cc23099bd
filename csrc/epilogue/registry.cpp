#include "epilogue/registry.h"

#include <cstring>
#include <string_view>
#include <type_traits>

#include "epilogue/headers.h"

namespace epigemm {
namespace {

constexpr bool LINEAR_AND_ELEMENTWISE = true;
constexpr bool ELEMENTWISE_ONLY = false;

// Functors say nothing where it is false.
template <class Functor, class = void>
constexpr bool kIsTranscendental = false;
template <class Functor>
constexpr bool kIsTranscendental<Functor, std::void_t<decltype(Functor::is_transcendental)>> =
    Functor::is_transcendental;

// Where an epilogue has a bias it is its first operand.
template <class Functor>
constexpr bool takes_bias() {
  return Functor::operands.size() > 1 && std::string_view(Functor::operands[1].name) == "bias";
}

constexpr EpilogueInfo kEpilogues[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms) \
  {EpilogueId::name,                           \
   #name,                                      \
   forms,                                      \
   Functor::operands.data(),                   \
   static_cast<int>(Functor::operands.size()), \
   takes_bias<Functor>(),                      \
   kIsTranscendental<Functor>},
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};

#define EPIGEMM_EPILOGUE(name, Functor, forms)                         \
  static_assert(Functor::operands[0].kind == OperandKind::Accumulator, \
                #Functor ": the accumulator is the first operand");    \
  static_assert(Functor::operands.size() <= kMaxBuiltinOperands + 1, #Functor ": too many operands");
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE

}  // namespace

const EpilogueInfo* epilogues() { return kEpilogues; }

const EpilogueInfo& epilogue_info(EpilogueId id) { return kEpilogues[static_cast<int>(id)]; }

const EpilogueInfo* find_epilogue(const char* name, std::size_t length) {
  for (const EpilogueInfo& info : kEpilogues) {
    if (std::strlen(info.name) == length && std::memcmp(info.name, name, length) == 0) return &info;
  }
  return nullptr;
}

}  // namespace epigemm
