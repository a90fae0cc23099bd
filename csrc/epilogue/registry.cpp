#include "epilogue/registry.h"

#include <cstring>

#include "epilogue/headers.h"

namespace epigemm {
namespace {

constexpr bool LINEAR_AND_ELEMENTWISE = true;
constexpr bool ELEMENTWISE_ONLY = false;

constexpr EpilogueInfo kEpilogues[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms) \
  {EpilogueId::name, #name, forms, Functor::operands.data(), static_cast<int>(Functor::operands.size())},
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};

#define EPIGEMM_EPILOGUE(name, Functor, forms)                         \
  static_assert(Functor::operands[0].kind == OperandKind::Accumulator, \
                #Functor ": the accumulator is the first operand");    \
  static_assert(Functor::operands.size() <= kMaxOperands + 1, #Functor ": too many operands");
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
