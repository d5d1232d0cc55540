// Layout: arrays one after another in a buffer that is yet to be allocated.
#pragma once

#include <cstddef>
#include <cstdint>

namespace h2o {

class Layout {
 public:
  // The offset of an array of `bytes`. Each begins on a cache line.
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
