// Buffer: owns memory of one back end.
#pragma once

#include <cstddef>
#include <utility>

namespace h2o {

// Move-only. The memory is zeroed on creation and freed by the function of the back end that
// allocated it, which also receives `owner`.
class Buffer {
 public:
  using Free = void (*)(void* data, void* owner) noexcept;

  Buffer() = default;
  Buffer(void* data, size_t size, Free free, void* owner = nullptr)
      : data_(static_cast<std::byte*>(data)), size_(size), free_(free), owner_(owner) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) free_(data_, owner_);
  }

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }  // bytes

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(free_, other.free_);
    std::swap(owner_, other.owner_);
  }

  std::byte* data_ = nullptr;
  size_t size_ = 0;
  Free free_ = nullptr;
  void* owner_ = nullptr;
};

}  // namespace h2o
