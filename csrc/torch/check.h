// Errors of the operators.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <sstream>
#include <stdexcept>

namespace epigemm::binding {

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// Raises a RuntimeError in Python if the condition does not hold. Not STD_TORCH_CHECK, whose messages begin with the
// path of the source file. The message is built only then.
template <class... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

// For calls into torch's C interface. The headers' own macro has changed its name between torch 2.10 and 2.13.
inline void check_code(AOTITorchError code) { check(code == AOTI_TORCH_SUCCESS, "torch's stable interface failed"); }

}  // namespace epigemm::binding
