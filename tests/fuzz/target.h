// Shared by the fuzz targets. Each defines fuzz(), which must handle any bytes safely.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string_view>

// Returns 0, or -1 for bytes that need not be kept in the corpus.
int fuzz(std::span<const std::byte> bytes);

// Aborts unless `condition` is true; libFuzzer then reports the bytes.
inline void check(bool condition, const char* expected) {
  if (condition) return;
  std::fprintf(stderr, "expected: %s\n", expected);
  std::abort();
}

// Consumes options from the front of a target's bytes; zeros past their end.
class Taker {
 public:
  explicit Taker(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class T>
  T take() {
    T value{};
    const std::span<const std::byte> from = take_bytes(sizeof(T));
    if (!from.empty()) std::memcpy(&value, from.data(), from.size());
    return value;
  }
  uint8_t byte() { return take<uint8_t>(); }

  // At most n bytes.
  std::span<const std::byte> take_bytes(size_t n) {
    const std::span<const std::byte> taken = bytes_.first(n < bytes_.size() ? n : bytes_.size());
    bytes_ = bytes_.subspan(taken.size());
    return taken;
  }
  std::string_view take_text(size_t n) {
    const std::span<const std::byte> taken = take_bytes(n);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }

  size_t left() const { return bytes_.size(); }

 private:
  std::span<const std::byte> bytes_;
};
