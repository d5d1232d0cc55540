#include "model/layer_offload.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "backend/backend.h"
#include "core/error.h"

namespace h2o {

size_t bytes_of(const std::vector<Tensor*>& tensors) {
  size_t n = 0;
  for (const Tensor* tensor : tensors) n += tensor->memory().size();
  return n;
}

size_t bytes_of(const Backend& backend, const std::vector<Tensor*>& tensors) {
  size_t n = 0;
  for (const Tensor* tensor : tensors) n += backend.upload_bytes(*tensor);
  return n;
}

LayerOffload::LayerOffload(std::vector<size_t> sizes, size_t others, size_t max_resident,
                           size_t place)
    : sizes_(std::move(sizes)) {
  for (size_t size : sizes_) place = std::max(place, size);
  const size_t least = others + 2 * place;
  require(max_resident >= least, "max_resident is ", max_resident,
          " bytes; two layers and the tensors outside of layers take ", least);

  size_t left = max_resident - least;
  while (n_kept_ < n_layers() && sizes_[n_kept_] <= left) left -= sizes_[n_kept_++];
  // With at most two streamed layers, all layers fit.
  if (n_streamed() <= 2) n_kept_ = n_layers();
}

size_t LayerOffload::streamed_bytes() const {
  return std::accumulate(sizes_.begin() + n_kept_, sizes_.end(), size_t{0});
}

int32_t LayerOffload::next(int32_t layer) const {
  return layer + 1 < n_layers() ? std::max(layer + 1, n_kept_) : n_kept_;
}

}  // namespace h2o
