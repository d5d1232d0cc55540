// Paths as UTF-8, as the C API and messages have them. Elsewhere than on Windows they are bytes,
// which stay as they are.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace h2o {

inline std::filesystem::path path_of(std::string_view utf8) {
  return std::u8string(utf8.begin(), utf8.end());
}

inline std::string utf8(const std::filesystem::path& path) {
  const std::u8string name = path.u8string();
  return {name.begin(), name.end()};
}

}  // namespace h2o
