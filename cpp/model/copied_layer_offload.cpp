#include "model/copied_layer_offload.h"

#include <algorithm>

namespace h2o {
namespace {

constexpr size_t kAlignment = 256;  // of tensors, as of allocations

std::vector<size_t> sizes_of(const Backend& backend, const std::vector<LayerTensors>& layers) {
  std::vector<size_t> sizes;
  for (const LayerTensors& layer : layers) sizes.push_back(bytes_of(backend, layer));
  return sizes;
}

// The i-th tensors of all layers share one offset, with space for the largest in whatever type: a
// back end may associate a layout with an address. The last element is the total size.
std::vector<size_t> offsets_of(const Backend& backend, const std::vector<LayerTensors>& layers) {
  std::vector<size_t> offsets = {0};
  for (size_t i = 0; i < layers.front().size(); ++i) {
    size_t largest = 0;
    for (const LayerTensors& layer : layers) {
      largest = std::max(largest, backend.upload_bytes(*layer[i]));
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
  for (Buffer& buffer : buffers_) buffer = backend.allocate(offsets_.back());
}

CopiedLayerOffload::~CopiedLayerOffload() {
  if (n_streamed() == 0) return;
  try {
    // A copy from memory that is about to be freed may be in progress; read() waits for operations,
    // and those after await_copies() wait for the copy.
    std::byte last{};
    backend_.await_copies();
    backend_.read(&last, buffers_[0].data(), sizeof(last));
  } catch (...) {
    // A failed device runs no copies.
  }
}

Tensor CopiedLayerOffload::upload(int32_t layer, size_t i, const Tensor& host) {
  Streamed& streamed = streamed_[layer - n_kept()];
  if (streamed.host.size() == 0) streamed.host = backend_.allocate_host(size(layer));
  const Tensor tensor = backend_.upload(host, buffers_[buffer_of(layer)].data() + offsets_[i]);
  const size_t bytes = backend_.upload_bytes(host);
  std::byte* const kept = streamed.host.data() + streamed.filled;
  backend_.read(kept, tensor.data, bytes);
  streamed.copies.push_back({tensor.data, kept, bytes});
  streamed.filled += bytes;
  return tensor;
}

// The next layer is copied while this one computes. Its buffer is free, because copies begin after
// the operations enqueued before. With an odd number of streamed layers the last and the first
// share a buffer, so the first is copied at the start of the next pass, while resident layers
// compute. That delays one copy per pass; a third buffer would cost more.
//
// An interrupted pass only leaves other layers than expected in the buffers.
void CopiedLayerOffload::prepare(int32_t layer) {
  if (n_streamed() == 0) return;
  const int32_t after = next(layer);
  if (!streams(layer)) return copy(after);
  copy(layer);  // no-op if it is resident
  backend_.await_copies();
  if (buffer_of(after) != buffer_of(layer)) copy(after);
}

void CopiedLayerOffload::copy(int32_t layer) {
  int32_t& here = here_[buffer_of(layer)];
  if (here == layer) return;
  here = -1;  // invalid during the copy
  backend_.copy_async(streamed_[layer - n_kept()].copies);
  here = layer;
}

}  // namespace h2o
