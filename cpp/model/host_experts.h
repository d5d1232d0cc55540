// HostExperts: a mixture-of-experts model on a back end with its own memory, which does not fit all
// experts.
//
// Dense weights are on the back end, and the experts of the first layers, as many as fit. The other
// experts stay in host memory, where operations read them directly: a pass needs few of them, so
// copying whole layers would take longer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "model/layer_offload.h"

namespace h2o {

class HostExperts {
 public:
  // layers: for each layer the matrices of all its experts. dense: bytes of all other weights on
  // the back end. Throws InvalidArgument if max_resident is less than that, and OutOfMemory.
  HostExperts(Backend& backend, const std::vector<LayerTensors>& layers, size_t dense,
              size_t max_resident);
  HostExperts(const HostExperts&) = delete;
  HostExperts& operator=(const HostExperts&) = delete;
  ~HostExperts();

  int32_t n_kept() const { return n_kept_; }  // layers whose experts are on the back end

  // Is this a matrix of experts that stay in host memory?
  bool has(int32_t layer, const Tensor* matrix) const;

  // Prepares such a matrix in host memory.
  Tensor upload(const Tensor& host);

 private:
  Backend& backend_;
  std::vector<LayerTensors> layers_;
  int32_t n_kept_ = 0;
  std::vector<Buffer> owned_;
};

}  // namespace h2o
