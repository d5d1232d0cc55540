// Layout: computes the offsets of arrays placed one after another in a buffer to be allocated.
#pragma once

#include <cstddef>
#include <cstdint>

namespace h2o {

class Layout {
 public:
  // Appends an array of `bytes` and returns its offset, aligned to a cache line.
  int64_t place(int64_t bytes) {
    const int64_t offset = size_;
    size_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  }
  size_t size() const { return static_cast<size_t>(size_); }

 private:
  static constexpr int64_t kAlignment = 64;
  int64_t size_ = 0;
};

}  // namespace h2o
