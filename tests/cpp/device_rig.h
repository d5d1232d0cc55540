// The device used by the tests, and arrays in its memory.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/make_backend.h"

namespace h2o {

// H2O_TEST_DEVICE selects the device, "cpu", "cuda" or "vulkan"; H2O_ISA the CPU's instruction set.
inline const std::string& test_device() {
  static const std::string name = [] {
    const char* device = std::getenv("H2O_TEST_DEVICE");
    return std::string(device != nullptr ? device : "cpu");
  }();
  return name;
}
inline bool on_cuda() {
  static const bool cuda = test_device().starts_with("cuda");
  return cuda;
}
inline bool on_vulkan() {
  static const bool vulkan = test_device().starts_with("vulkan");
  return vulkan;
}
inline bool on_gpu() { return on_cuda() || on_vulkan(); }

// Does the device archive evicted tokens?
inline bool archives() { return !on_vulkan(); }

inline std::unique_ptr<Backend> test_backend(int n_threads = 1) {
  return make_backend(test_device(), n_threads);
}

// A float matrix in a back end's memory, surrounded by guard values that must not change.
class DeviceMatrix {
 public:
  DeviceMatrix(Backend& backend, std::span<const float> values, int64_t rows, int64_t cols)
      : backend_(backend),
        buffer_(backend.allocate((values.size() + 2 * kGuards) * sizeof(float))),
        tensor_{buffer_.data() + kGuards * sizeof(float), DType::f32, rows, cols} {
    REQUIRE(std::ssize(values) == rows * cols);
    const std::vector<float> guards(kGuards, kGuard);
    backend.write(buffer_.data(), guards.data(), kGuards * sizeof(float));
    backend.write(tensor_.data + tensor_.bytes(), guards.data(), kGuards * sizeof(float));
    write(values);
  }

  // NaN until it is written.
  DeviceMatrix(Backend& backend, int64_t rows, int64_t cols)
      : DeviceMatrix(backend, std::vector<float>(rows * cols, NAN), rows, cols) {}

  void write(std::span<const float> values) {
    backend_.write(tensor_.data, values.data(), values.size_bytes());
  }

  std::vector<float> read() const {
    const int64_t n = tensor_.rows * tensor_.cols;
    std::vector<float> all(n + 2 * kGuards);
    backend_.read(all.data(), buffer_.data(), all.size() * sizeof(float));
    const auto intact = [](auto begin) { return std::count(begin, begin + kGuards, kGuard); };
    REQUIRE(intact(all.begin()) == kGuards);
    REQUIRE(intact(all.end() - kGuards) == kGuards);
    return {all.begin() + kGuards, all.end() - kGuards};
  }

  operator const Tensor&() const { return tensor_; }
  operator Affine() const { return {tensor_, {}}; }

 private:
  static constexpr int64_t kGuards = 16;  // 64 bytes, as Layout aligns
  static constexpr float kGuard = 7;

  Backend& backend_;
  Buffer buffer_;
  Tensor tensor_;
};

// Runs a pass over a batch of n_rows rows of one sequence, from position 0.
template <class Pass>
void run_rows(Backend& backend, int64_t n_rows, const Pass& pass) {
  Batch batch;
  batch.add(0, 0, std::vector<int32_t>(n_rows));
  batch.want_last();
  backend.run(batch, [&] { pass(batch); });
}

}  // namespace h2o
