#include "model/weight_stream.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <string_view>

#include "core/error.h"

namespace h2o {
namespace {

// Of "blk.N.attn_q.weight" N; -1 if the tensor is of no layer.
int32_t layer_of(std::string_view name) {
  constexpr std::string_view kPrefix = "blk.";
  int32_t layer = -1;
  if (name.starts_with(kPrefix)) {
    std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), layer);
  }
  return layer;
}

size_t size_of(const std::vector<std::span<const std::byte>>& layer) {
  return std::accumulate(layer.begin(), layer.end(), size_t{0},
                         [](size_t n, const auto& bytes) { return n + bytes.size(); });
}

}  // namespace

WeightStream::WeightStream(const GgufModel& file, int32_t n_layers, size_t max_resident)
    : layers_(n_layers) {
  require(MappedFile::can_release(), "[weights] max_resident: this system cannot let go of pages");
  std::vector<Bytes> others;
  for (const GgufFile& part : file.files()) {
    for (const GgufTensor& tensor : part.tensors()) {
      const int32_t layer = layer_of(tensor.name);
      (layer >= 0 && layer < n_layers ? layers_[layer] : others).push_back(tensor.data);
    }
  }
  size_t largest = 0;
  for (const auto& layer : layers_) largest = std::max(largest, size_of(layer));
  const size_t least = size_of(others) + 2 * largest;
  require(max_resident >= least, "[weights] max_resident is ", max_resident,
          " bytes; two layers and what is not part of any take ", least);

  size_t left = max_resident - least;
  while (n_kept_ < n_layers && size_of(layers_[n_kept_]) <= left) {
    left -= size_of(layers_[n_kept_++]);
  }
  // With two layers that would take turns all of them fit.
  if (n_streamed() <= 2) n_kept_ = n_layers;
  for (const Bytes& bytes : others) MappedFile::populate(bytes);
  for (int32_t l = 0; l < n_kept_; ++l) {
    for (const Bytes& bytes : layers_[l]) MappedFile::populate(bytes);
  }
  if (n_streamed() == 0) return;
  thread_ = std::thread([this] { work(); });
  bring(n_kept_);
}

WeightStream::~WeightStream() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

size_t WeightStream::streamed_bytes() const {
  size_t n = 0;
  for (int32_t l = n_kept_; l < n_layers(); ++l) n += size_of(layers_[l]);
  return n;
}

void WeightStream::enter(int32_t layer) {
  if (layer < n_kept_) return;
  {
    std::unique_lock lock(mutex_);
    if (wanted_ == layer) changed_.wait(lock, [&] { return is_here_; });
    // Otherwise the pass before this one did not end, and this layer comes as it is touched.
  }
  if (current_ >= 0 && current_ != layer) {
    for (const Bytes& bytes : layers_[current_]) MappedFile::release(bytes);
  }
  current_ = layer;
  bring(layer + 1 < n_layers() ? layer + 1 : n_kept_);
}

void WeightStream::bring(int32_t layer) {
  {
    std::unique_lock lock(mutex_);
    if (wanted_ == layer) return;
    // One that was asked for and not entered must not stay.
    changed_.wait(lock, [&] { return wanted_ < 0 || is_here_; });
    if (wanted_ >= 0 && wanted_ != current_) {
      for (const Bytes& bytes : layers_[wanted_]) MappedFile::release(bytes);
    }
    wanted_ = layer;
    is_here_ = false;
  }
  changed_.notify_all();
}

void WeightStream::work() {
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
