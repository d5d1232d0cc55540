#include "model/copied_layer_offload.h"

#include <algorithm>

namespace h2o {
namespace {

constexpr size_t kAlignment = 256;  // of tensors, as of allocated memory

size_t upload_bytes(const Backend& backend, const Tensor* tensor) {
  return *tensor ? backend.upload_bytes(*tensor) : 0;
}

std::vector<size_t> sizes_of(const Backend& backend, const std::vector<LayerTensors>& layers) {
  std::vector<size_t> sizes;
  for (const LayerTensors& layer : layers) {
    size_t& size = sizes.emplace_back();
    for (const Tensor* tensor : layer) size += upload_bytes(backend, tensor);
  }
  return sizes;
}

// The i-th tensors of all layers begin at one offset, with room for the largest, whatever types
// they have: a back end tells by where a tensor begins how it lies. Last comes the size of it all.
std::vector<size_t> offsets_of(const Backend& backend, const std::vector<LayerTensors>& layers) {
  std::vector<size_t> offsets = {0};
  for (size_t i = 0; i < layers.front().size(); ++i) {
    size_t largest = 0;
    for (const LayerTensors& layer : layers) {
      largest = std::max(largest, upload_bytes(backend, layer[i]));
    }
    offsets.push_back(offsets.back() + (largest + kAlignment - 1) / kAlignment * kAlignment);
  }
  return offsets;
}

}  // namespace

CopiedLayerOffload::CopiedLayerOffload(Backend& backend, const std::vector<LayerTensors>& layers,
                                       size_t others, size_t max_resident)
    : LayerOffload(sizes_of(backend, layers), others, max_resident,
                   offsets_of(backend, layers).back()),
      backend_(backend),
      offsets_(offsets_of(backend, layers)),
      streamed_(n_streamed()) {
  size_t resident = others;
  for (int32_t l = 0; l < n_kept(); ++l) resident += size(l);
  if (n_streamed() > 0) resident += 2 * offsets_.back();
  backend.expect_weights(resident);
  if (n_streamed() == 0) return;
  for (Buffer& place : places_) place = backend.allocate(offsets_.back());
}

CopiedLayerOffload::~CopiedLayerOffload() {
  if (n_streamed() == 0) return;
  try {
    // A copy may be under way from memory that is freed now; read() waits for operations, and those
    // that follow await_copies() wait for it.
    std::byte last{};
    backend_.await_copies();
    backend_.read(&last, places_[0].data(), sizeof(last));
  } catch (...) {
    // Of a device that fails nothing is under way.
  }
}

Tensor CopiedLayerOffload::upload(int32_t layer, size_t i, const Tensor& host) {
  Streamed& streamed = streamed_[layer - n_kept()];
  if (streamed.host.size() == 0) streamed.host = backend_.allocate_host(size(layer));
  const Tensor tensor = backend_.upload(host, places_[place_of(layer)].data() + offsets_[i]);
  const size_t bytes = backend_.upload_bytes(host);
  std::byte* const kept = streamed.host.data() + streamed.filled;
  backend_.read(kept, tensor.data, bytes);
  streamed.copies.push_back({tensor.data, kept, bytes});
  streamed.filled += bytes;
  return tensor;
}

// The next layer is copied while this one computes, and what was in its place has been computed:
// copies begin after what was asked for before. An odd number of layers makes an exception: the
// last and the first have one place, so the first is copied when the next pass begins, while layers
// that stay compute, if there are any. That delays one copy of a pass; another place costs more.
//
// A pass that did not end has left other layers than expected, which makes no difference.
void CopiedLayerOffload::enter(int32_t layer) {
  if (n_streamed() == 0) return;
  const int32_t after = next(layer);
  if (!streams(layer)) return copy(after);
  copy(layer);  // unless it is here
  backend_.await_copies();
  if (place_of(after) != place_of(layer)) copy(after);
}

void CopiedLayerOffload::copy(int32_t layer) {
  int32_t& here = here_[place_of(layer)];
  if (here == layer) return;
  here = -1;  // while it is neither
  backend_.copy_async(streamed_[layer - n_kept()].copies);
  here = layer;
}

}  // namespace h2o
