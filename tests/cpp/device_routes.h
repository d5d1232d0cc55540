// Routes in the test device's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "device_rig.h"

namespace h2o {

class DeviceRoutes {
 public:
  DeviceRoutes(Backend& backend, int64_t n_rows, int32_t n_experts, int32_t n_used)
      : backend_(backend),
        n_copies_(n_rows * n_used),
        memory_(backend.allocate(4 * (2 * n_copies_ + n_experts + 1))) {
    routes.n_experts = n_experts;
    routes.n_used = n_used;
    routes.weights = memory_.as<float>();
    routes.copy_rows = memory_.as<int32_t>() + n_copies_;
    routes.offsets = routes.copy_rows + n_copies_;
  }

  std::vector<float> weights() const { return read(routes.weights, n_copies_); }
  std::vector<int32_t> copy_rows() const { return read(routes.copy_rows, n_copies_); }
  std::vector<int32_t> offsets() const { return read(routes.offsets, routes.n_experts + 1); }

  void write_offsets(const std::vector<int32_t>& values) {
    backend_.write(routes.offsets, values.data(), values.size() * 4);
  }
  void write(const std::vector<float>& weights, const std::vector<int32_t>& copy_rows) {
    backend_.write(routes.weights, weights.data(), weights.size() * 4);
    backend_.write(routes.copy_rows, copy_rows.data(), copy_rows.size() * 4);
  }

  Routes routes{.n_experts = 0,
                .n_used = 0,
                .normalized = false,
                .scale = 1,
                .weights = nullptr,
                .copy_rows = nullptr,
                .offsets = nullptr};

 private:
  template <class T>
  std::vector<T> read(const T* from, int64_t n) const {
    std::vector<T> values(n);
    backend_.read(values.data(), from, n * sizeof(T));
    return values;
  }

  Backend& backend_;
  int64_t n_copies_;
  Buffer memory_;
};

}  // namespace h2o
