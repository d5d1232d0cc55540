// Conversion between std::filesystem::path and the UTF-8 paths of the C API and messages. Only
// Windows needs one; elsewhere paths are byte strings.
#pragma once

#include <cerrno>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/error.h"

namespace h2o {

// Throws FileError on Windows if `utf8` is not valid UTF-8.
inline std::filesystem::path path_of(std::string_view utf8) {
  try {
    return std::u8string(utf8.begin(), utf8.end());
  } catch (const std::runtime_error&) {  // all that libc++ throws
    throw FileError(ENOENT, std::string(utf8));
  }
}

inline std::string utf8(const std::filesystem::path& path) {
  const std::u8string name = path.u8string();
  return {name.begin(), name.end()};
}

}  // namespace h2o
