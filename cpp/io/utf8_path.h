// Paths as UTF-8, as the C API and messages have them. Elsewhere than on Windows they are bytes,
// which stay as they are.
#pragma once

#include <cerrno>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/error.h"

namespace h2o {

// Throws FileError on Windows for what is not UTF-8.
inline std::filesystem::path path_of(std::string_view utf8) {
  try {
    return std::u8string(utf8.begin(), utf8.end());
  } catch (const std::runtime_error&) {  // libc++ throws no more than that
    throw FileError(ENOENT, std::string(utf8));
  }
}

inline std::string utf8(const std::filesystem::path& path) {
  const std::u8string name = path.u8string();
  return {name.begin(), name.end()};
}

}  // namespace h2o
