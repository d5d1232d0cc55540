#include "model/mapped_layer_offload.h"

#include <algorithm>

#include "core/error.h"
#include "io/mapped_file.h"

namespace h2o {
namespace {

using Bytes = std::span<const std::byte>;

// Byte ranges of tensors in the file; adjacent tensors (such as slices of a fused one) are merged.
std::vector<Bytes> ranges_of(const std::vector<Tensor*>& tensors) {
  std::vector<Bytes> all;
  for (const Tensor* tensor : tensors) {
    if (*tensor) all.push_back(tensor->memory());
  }
  std::ranges::sort(all, {}, [](const Bytes& bytes) { return bytes.data(); });
  std::vector<Bytes> whole;
  for (const Bytes& bytes : all) {
    if (!whole.empty() && whole.back().data() + whole.back().size() == bytes.data()) {
      whole.back() = {whole.back().data(), whole.back().size() + bytes.size()};
    } else {
      whole.push_back(bytes);
    }
  }
  return whole;
}

std::vector<size_t> sizes_of(const std::vector<LayerTensors>& layers) {
  std::vector<size_t> sizes;
  for (const LayerTensors& layer : layers) sizes.push_back(bytes_of(layer));
  return sizes;
}

}  // namespace

MappedLayerOffload::MappedLayerOffload(const std::vector<LayerTensors>& layers,
                                       const std::vector<Tensor*>& others, size_t max_resident)
    : LayerOffload(sizes_of(layers), bytes_of(others), max_resident) {
  require(MappedFile::can_release(), "max_resident: this system cannot release pages");
  for (const Bytes& bytes : ranges_of(others)) MappedFile::populate(bytes);
  for (const LayerTensors& layer : layers) layers_.push_back(ranges_of(layer));
  for (int32_t l = 0; l < n_kept(); ++l) {
    for (const Bytes& bytes : layers_[l]) MappedFile::populate(bytes);
  }
  if (n_streamed() == 0) return;
  prefetch_->thread = std::thread([this] { work(); });
  load(n_kept());
}

MappedLayerOffload::~MappedLayerOffload() {
  if (process_id() != process_) {
    (void)prefetch_.release();  // leaked
    return;
  }
  if (!prefetch_->thread.joinable()) return;
  {
    const std::lock_guard lock(prefetch_->mutex);
    prefetch_->ended = true;
  }
  prefetch_->changed.notify_all();
  prefetch_->thread.join();
}

void MappedLayerOffload::prepare(int32_t layer) {
  if (layer < n_kept()) return;
  {
    Prefetch& p = *prefetch_;
    std::unique_lock lock(p.mutex);
    if (p.wanted == layer) p.changed.wait(lock, [&] { return p.is_here; });
    // Otherwise the previous pass was interrupted, and this layer is read on page faults.
  }
  if (current_ >= 0 && current_ != layer) {
    for (const Bytes& bytes : layers_[current_]) MappedFile::release(bytes);
  }
  current_ = layer;
  load(next(layer));
}

void MappedLayerOffload::load(int32_t layer) {
  Prefetch& p = *prefetch_;
  {
    std::unique_lock lock(p.mutex);
    if (p.wanted == layer) return;
    // A layer that was prefetched but not used must be released.
    p.changed.wait(lock, [&] { return p.wanted < 0 || p.is_here; });
    if (p.wanted >= 0 && p.wanted != current_) {
      for (const Bytes& bytes : layers_[p.wanted]) MappedFile::release(bytes);
    }
    p.wanted = layer;
    p.is_here = false;
  }
  p.changed.notify_all();
}

void MappedLayerOffload::work() {
  Prefetch& p = *prefetch_;
  std::unique_lock lock(p.mutex);
  for (;;) {
    p.changed.wait(lock, [&] { return p.ended || (p.wanted >= 0 && !p.is_here); });
    if (p.ended) return;
    const std::vector<Bytes>& layer = layers_[p.wanted];
    lock.unlock();
    for (const Bytes& bytes : layer) MappedFile::populate(bytes);
    lock.lock();
    p.is_here = true;
    p.changed.notify_all();
  }
}

}  // namespace h2o
