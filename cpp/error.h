// Failures in the compiled core are exceptions whose text carries the values; pybind11 turns them into Python exceptions.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace upfold {

// Thrown for a Problem or block that a kernel cannot run: the Python layer validates first, so this marks a bug there.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Of each source file its own: one source is compiled for several instruction sets, and the linker would keep any one copy.
template <typename... Parts>
static std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <typename... Parts>
static void require(bool condition, const Parts&... parts) {
  if (!condition) throw InvalidArgument(concat(parts...));
}

}  // namespace upfold
