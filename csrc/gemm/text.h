// Reasons in words. Put together only where there is something to say: a stream costs more than the decision itself.
#pragma once

#include <sstream>
#include <string>

namespace epigemm {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  stream.precision(4);
  (stream << ... << parts);
  return stream.str();
}

}  // namespace epigemm
