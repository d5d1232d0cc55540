#include "model/mapped_layer_offload.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "io/mapped_file.h"

namespace h2o {
namespace {

using Bytes = std::span<const std::byte>;

// Byte ranges of tensors in the file; adjacent tensors (such as slices of a fused one) are merged.
std::vector<Bytes> bytes_of(const std::vector<Tensor*>& tensors) {
  std::vector<Bytes> all;
  for (const Tensor* tensor : tensors) {
    if (*tensor) all.emplace_back(tensor->data, static_cast<size_t>(tensor->bytes()));
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

size_t size_of(const std::vector<Bytes>& all) {
  return std::accumulate(all.begin(), all.end(), size_t{0},
                         [](size_t n, const Bytes& bytes) { return n + bytes.size(); });
}

std::vector<size_t> sizes_of(const std::vector<LayerTensors>& layers) {
  std::vector<size_t> sizes;
  for (const LayerTensors& layer : layers) sizes.push_back(size_of(bytes_of(layer)));
  return sizes;
}

}  // namespace

MappedLayerOffload::MappedLayerOffload(const std::vector<LayerTensors>& layers,
                                       const std::vector<Tensor*>& others, size_t max_resident)
    : LayerOffload(sizes_of(layers), size_of(bytes_of(others)), max_resident) {
  require(MappedFile::can_release(), "max_resident: this system cannot release pages");
  for (const Bytes& bytes : bytes_of(others)) MappedFile::populate(bytes);
  for (const LayerTensors& layer : layers) layers_.push_back(bytes_of(layer));
  for (int32_t l = 0; l < n_kept(); ++l) {
    for (const Bytes& bytes : layers_[l]) MappedFile::populate(bytes);
  }
  if (n_streamed() == 0) return;
  thread_ = std::thread([this] { work(); });
  load(n_kept());
}

MappedLayerOffload::~MappedLayerOffload() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void MappedLayerOffload::prepare(int32_t layer) {
  if (layer < n_kept()) return;
  {
    std::unique_lock lock(mutex_);
    if (wanted_ == layer) changed_.wait(lock, [&] { return is_here_; });
    // Otherwise the previous pass was interrupted, and this layer is read on page faults.
  }
  if (current_ >= 0 && current_ != layer) {
    for (const Bytes& bytes : layers_[current_]) MappedFile::release(bytes);
  }
  current_ = layer;
  load(next(layer));
}

void MappedLayerOffload::load(int32_t layer) {
  {
    std::unique_lock lock(mutex_);
    if (wanted_ == layer) return;
    // A layer that was prefetched but not used must be released.
    changed_.wait(lock, [&] { return wanted_ < 0 || is_here_; });
    if (wanted_ >= 0 && wanted_ != current_) {
      for (const Bytes& bytes : layers_[wanted_]) MappedFile::release(bytes);
    }
    wanted_ = layer;
    is_here_ = false;
  }
  changed_.notify_all();
}

void MappedLayerOffload::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return ended_ || (wanted_ >= 0 && !is_here_); });
    if (ended_) return;
    const std::vector<Bytes>& layer = layers_[wanted_];
    lock.unlock();
    for (const Bytes& bytes : layer) MappedFile::populate(bytes);
    lock.lock();
    is_here_ = true;
    changed_.notify_all();
  }
}

}  // namespace h2o
