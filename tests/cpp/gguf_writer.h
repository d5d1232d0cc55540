// Builds GGUF files byte by byte.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/error.h"
#include "io/gguf.h"

namespace h2o {

struct TempFile {
  explicit TempFile(const std::string& content) {
    static const unsigned kRun = std::random_device{}();
    static int count = 0;
    path = std::filesystem::temp_directory_path() / concat("h2o_test_gguf_", kRun, "_", count++);
    std::ofstream(path, std::ios::binary) << content;
  }
  ~TempFile() { std::filesystem::remove(path); }

  std::filesystem::path path;
};

// Numbers in native byte order, strings preceded by their length.
template <class... Parts>
std::string bytes(const Parts&... parts) {
  std::string out;
  const auto add = [&out](const auto& part) {
    if constexpr (std::is_convertible_v<decltype(part), std::string_view>) {
      const std::string_view characters(part);
      out.append(bytes(uint64_t{characters.size()})).append(characters);
    } else {
      out.append(reinterpret_cast<const char*>(&part), sizeof(part));
    }
  };
  (add(parts), ...);
  return out;
}

struct Writer {
  uint32_t version = 3;
  uint64_t n_tensors = 0, n_keys = 0, alignment = 32;
  std::string keys = {}, infos = {}, data = {};

  template <class... Parts>
  Writer& key(std::string_view name, GgufType type, const Parts&... value) {
    ++n_keys;
    keys += bytes(name, type, value...);
    return *this;
  }

  // `data` are the bytes of n values.
  Writer& array(std::string_view name, GgufType type, uint64_t n, const std::string& data) {
    key(name, GgufType::array, type, n);
    keys += data;
    return *this;
  }

  Writer& tensor(std::string_view name, std::vector<uint64_t> dims, uint32_t type,
                 uint64_t offset) {
    ++n_tensors;
    infos += bytes(name, static_cast<uint32_t>(dims.size()));
    for (const uint64_t dim : dims) infos += bytes(dim);
    infos += bytes(type, offset);
    return *this;
  }

  std::string file() const {
    std::string out = "GGUF" + bytes(version, n_tensors, n_keys) + keys + infos;
    while (out.size() % alignment != 0) out += '\0';
    return out + data;
  }
};

}  // namespace h2o
