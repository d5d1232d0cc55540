// Serialization of values as little-endian bytes, for snapshots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/error.h"

namespace h2o {

class ByteWriter {
 public:
  template <class T>
  void put(const T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);  // nothing with padding
    put(std::span(&value, 1));
  }
  template <class T>
  void put(std::span<const T> values) {
    const size_t begin = bytes_.size();
    bytes_.resize(begin + values.size_bytes());
    if (!values.empty()) std::memcpy(bytes_.data() + begin, values.data(), values.size_bytes());
  }
  // Its length, then its bytes.
  void put_text(std::string_view text) {
    put(uint64_t{text.size()});
    put(std::span(text));
  }

  // Reserves space for n more bytes, to avoid reallocation.
  void reserve(size_t n) { bytes_.reserve(bytes_.size() + n); }

  std::byte* extend(size_t n) {
    bytes_.resize(bytes_.size() + n);
    return bytes_.data() + bytes_.size() - n;
  }

  std::vector<std::byte>& bytes() { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

// Validates all input.
class ByteReader {
 public:
  // `what` is the prefix of error messages.
  ByteReader(std::string_view what, std::span<const std::byte> bytes)
      : what_(what), bytes_(bytes) {}

  // Throws FormatError if fewer than n bytes are left.
  std::span<const std::byte> take(uint64_t n) {
    if (n > bytes_.size()) throw FormatError(concat(what_, " ends too early"));
    const std::span<const std::byte> taken = bytes_.first(n);
    bytes_ = bytes_.subspan(n);
    return taken;
  }
  template <class T>
  T get() {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  template <class T>
  std::vector<T> get(uint64_t n) {
    if (n > bytes_.size() / sizeof(T)) throw FormatError(concat(what_, " ends too early"));
    std::vector<T> values(n);
    if (n > 0) std::memcpy(values.data(), take(n * sizeof(T)).data(), n * sizeof(T));
    return values;
  }
  std::string_view get_text() {
    const std::span<const std::byte> bytes = take(get<uint64_t>());
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  std::string_view what() const { return what_; }
  size_t left() const { return bytes_.size(); }

 private:
  std::string_view what_;
  std::span<const std::byte> bytes_;
};

// FNV-1a over 8-byte words, the last one zero-padded, starting from `seed`. Detects accidental
// damage, not tampering.
inline uint64_t checksum(std::span<const std::byte> bytes, uint64_t seed = 14695981039346656037U) {
  uint64_t sum = seed ^ bytes.size();
  for (size_t i = 0; i < bytes.size(); i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, bytes.size() - i < 8 ? bytes.size() - i : 8);
    sum = (sum ^ word) * 1099511628211U;
    sum ^= sum >> 29;  // so that high bits affect the low ones
  }
  return sum;
}

}  // namespace h2o
