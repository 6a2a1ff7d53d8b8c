// Failures in the compiled core are exceptions whose text carries the values; pybind11 turns them into Python exceptions.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace upfold {

// Thrown for a Problem or block that a kernel cannot run: the Python layer validates first, so this marks a bug there.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Without streams: they are slow to set up, and text is made beside launches. Each source file has its own copy: one source is
// compiled for several instruction sets, and the linker would keep any one.
template <typename... Parts>
static std::string concat(const Parts&... parts) {
  std::string text;
  const auto append = [&text](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (append(parts), ...);
  return text;
}

template <typename... Parts>
static void require(bool condition, const Parts&... parts) {
  if (!condition) throw InvalidArgument(concat(parts...));
}

}  // namespace upfold
