// Builds the text of reasons. Only called if there is a reason, because a stream takes longer than the decision itself.
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
