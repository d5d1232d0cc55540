#include "model/host_experts.h"

#include <algorithm>

#include "core/error.h"

namespace h2o {

HostExperts::HostExperts(Backend& backend, const std::vector<LayerTensors>& layers, size_t dense,
                         size_t max_resident)
    : backend_(backend), layers_(layers) {
  require(max_resident >= dense, "max_resident is ", max_resident,
          " bytes; the dense weights take ", dense);
  size_t resident = dense;
  for (const LayerTensors& layer : layers_) {
    const size_t size = bytes_of(backend, layer);
    if (size > max_resident - resident) break;
    resident += size;
    ++n_kept_;
  }
  backend.expect_weights(resident);
}

HostExperts::~HostExperts() {
  try {
    backend_.finish();  // operations may still read or rearrange them
  } catch (...) {
    // A failed device runs nothing.
  }
}

bool HostExperts::has(int32_t layer, const Tensor* matrix) const {
  return layer >= n_kept_ && std::ranges::find(layers_[layer], matrix) != layers_[layer].end();
}

Tensor HostExperts::upload(const Tensor& host) {
  owned_.push_back(backend_.allocate_host(backend_.upload_bytes(host)));
  return backend_.upload(host, owned_.back().data());
}

}  // namespace h2o
