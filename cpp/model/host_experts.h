// HostExperts: a model with mixtures of experts, on a back end with memory of its own, which does
// not hold them all.
//
// What every token needs is there, and the experts of the first layers, as many as fit. Those of
// the others stay in the host's memory, where operations read what rows are sent to: of many
// experts a few, so it would take longer to copy whole layers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "model/layer_offload.h"

namespace h2o {

class HostExperts {
 public:
  // layers: of each the matrices of all its experts. dense: the bytes of what stays, on the back
  // end. Throws InvalidArgument if max_resident is less than that, and OutOfMemory.
  HostExperts(Backend& backend, const std::vector<LayerTensors>& layers, size_t dense,
              size_t max_resident);
  HostExperts(const HostExperts&) = delete;
  HostExperts& operator=(const HostExperts&) = delete;
  ~HostExperts();

  int32_t n_kept() const { return n_kept_; }  // layers whose experts are on the back end

  // Is this a matrix of experts that stay in the host's memory?
  bool has(int32_t layer, const Tensor* matrix) const;

  // Makes it ready there.
  Tensor upload(const Tensor& host);

 private:
  Backend& backend_;
  std::vector<LayerTensors> layers_;
  int32_t n_kept_ = 0;
  std::vector<Buffer> owned_;
};

}  // namespace h2o
