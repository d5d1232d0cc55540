#include "model/residency.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <functional>
#include <iterator>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/process.h"
#include "io/mapped_file.h"

namespace h2o {
namespace {

using Bytes = std::span<const std::byte>;
using Unit = WeightResidency::Unit;

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

void populate(const std::vector<Bytes>& ranges) {
  for (const Bytes& bytes : ranges) MappedFile::populate(bytes);
}

void release(const std::vector<Bytes>& ranges) {
  for (const Bytes& bytes : ranges) MappedFile::release(bytes);
}

class MappedLayers final : public WeightResidency {
 public:
  MappedLayers(const ModelTensors& tensors, size_t max_resident) : WeightResidency(Unit::layers) {
    std::vector<size_t> sizes;
    for (const LayerTensors& layer : tensors.layers) {
      sizes.push_back(bytes_of(layer));
      layers_.push_back(ranges_of(layer));
    }
    keep_layers(sizes, bytes_of(tensors.others), max_resident);
    populate(ranges_of(tensors.others));
    for (int32_t l = 0; l < n_kept(); ++l) populate(layers_[l]);
    if (n_streamed() == 0) return;
    prefetch_->thread = std::thread([this] { work(); });
    load(n_kept());
  }

  ~MappedLayers() override {
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

  // Blocks until the layer is in memory.
  void prepare(int32_t layer) override {
    if (!streams(layer)) return;
    {
      Prefetch& p = *prefetch_;
      std::unique_lock lock(p.mutex);
      if (p.wanted == layer) p.changed.wait(lock, [&] { return p.is_loaded; });
      // Otherwise the previous pass was interrupted, and this layer is read on page faults.
    }
    if (current_ >= 0 && current_ != layer) release(layers_[current_]);
    current_ = layer;
    load(next(layer));
  }

 private:
  // State shared with the thread. In a forked child, which lacks it, it cannot be destroyed.
  struct Prefetch {
    std::mutex mutex;  // guards the members below
    std::condition_variable changed;
    int32_t wanted = -1;     // the layer being prefetched
    bool is_loaded = false;  // `wanted` is in memory
    bool ended = false;
    std::thread thread;
  };

  void load(int32_t layer) {  // runs on the thread
    Prefetch& p = *prefetch_;
    {
      std::unique_lock lock(p.mutex);
      if (p.wanted == layer) return;
      // A layer that was prefetched but not used must be released.
      p.changed.wait(lock, [&] { return p.wanted < 0 || p.is_loaded; });
      if (p.wanted >= 0 && p.wanted != current_) release(layers_[p.wanted]);
      p.wanted = layer;
      p.is_loaded = false;
    }
    p.changed.notify_all();
  }

  void work() {
    Prefetch& p = *prefetch_;
    std::unique_lock lock(p.mutex);
    for (;;) {
      p.changed.wait(lock, [&] { return p.ended || (p.wanted >= 0 && !p.is_loaded); });
      if (p.ended) return;
      const std::vector<Bytes>& layer = layers_[p.wanted];
      lock.unlock();
      populate(layer);
      lock.lock();
      p.is_loaded = true;
      p.changed.notify_all();
    }
  }

  const int64_t process_ = process_id();
  std::vector<std::vector<Bytes>> layers_;  // byte ranges of each layer's tensors
  int32_t current_ = -1;                    // the streamed layer that computes now
  std::unique_ptr<Prefetch> prefetch_ = std::make_unique<Prefetch>();
};

// A layer always uses the same one of two buffers, so that its tensors' addresses never change.
class CopiedLayers final : public WeightResidency {
 public:
  CopiedLayers(Backend& backend, const ModelTensors& tensors, size_t max_resident)
      : WeightResidency(Unit::layers),
        backend_(backend),
        offsets_(offsets_of(backend, tensors.layers)) {
    for (const LayerTensors& layer : tensors.layers) sizes_.push_back(bytes_of(backend, layer));
    const size_t others = bytes_of(backend, tensors.others);
    keep_layers(sizes_, others, max_resident, offsets_.back());
    size_t resident = std::accumulate(sizes_.begin(), sizes_.begin() + n_kept(), others);
    if (n_streamed() > 0) resident += 2 * offsets_.back();
    backend.expect_weights(resident);
    if (n_streamed() == 0) return;
    streamed_.resize(n_streamed());
    for (Buffer& buffer : buffers_) buffer = backend.allocate(offsets_.back());
  }

  ~CopiedLayers() override {
    if (buffers_[1].size() == 0) return;
    try {
      // A copy from memory that is about to be freed may be in progress; read() waits for
      // operations, and those after await_copies() wait for the copy.
      std::byte last{};
      backend_.await_copies();
      backend_.read(&last, buffers_[0].data(), sizeof(last));
    } catch (...) {
      // A failed device runs no copies.
    }
  }

  // Returns the tensor at its future address.
  std::optional<Tensor> place(int32_t layer, size_t i, const Tensor& host) override {
    if (!streams(layer)) return std::nullopt;
    Streamed& streamed = streamed_[layer - n_kept()];
    if (streamed.host.size() == 0) streamed.host = backend_.allocate_host(sizes_[layer]);
    const Tensor tensor = backend_.upload(host, buffers_[buffer_of(layer)].data() + offsets_[i]);
    const size_t bytes = backend_.upload_bytes(host);
    std::byte* const kept = streamed.host.data() + streamed.filled;
    backend_.read(kept, tensor.data, bytes);
    streamed.copies.push_back({tensor.data, kept, bytes});
    streamed.filled += bytes;
    return tensor;
  }

  // The next layer is copied while this one computes. Its buffer is free, because copies begin
  // after the operations enqueued before. With an odd number of streamed layers the last and the
  // first share a buffer, so the first is copied at the start of the next pass, while resident
  // layers compute. That delays one copy per pass; a third buffer would cost more.
  //
  // An interrupted pass only leaves other layers than expected in the buffers.
  void prepare(int32_t layer) override {
    if (n_streamed() == 0) return;
    const int32_t after = next(layer);
    if (!streams(layer)) return copy(after);
    copy(layer);  // no-op if it is resident
    backend_.await_copies();
    if (buffer_of(after) != buffer_of(layer)) copy(after);
  }

 private:
  static constexpr size_t kAlignment = 256;  // of tensors, as of allocations

  struct Streamed {
    Buffer host;
    size_t filled = 0;  // bytes used
    std::vector<HostCopy> copies;
  };

  // The i-th tensors of all layers share one offset, with space for the largest in whatever type: a
  // back end may associate a layout with an address. The last element is the total size.
  static std::vector<size_t> offsets_of(const Backend& backend,
                                        const std::vector<LayerTensors>& layers) {
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

  int32_t buffer_of(int32_t layer) const { return (layer - n_kept()) % 2; }

  void copy(int32_t layer) {
    int32_t& loaded = loaded_[buffer_of(layer)];
    if (loaded == layer) return;
    loaded = -1;  // invalid during the copy
    backend_.copy_async(streamed_[layer - n_kept()].copies);
    loaded = layer;
  }

  Backend& backend_;
  std::vector<size_t> offsets_;  // of the i-th tensor of any layer in its buffer
  std::vector<size_t> sizes_;    // of each layer
  std::array<Buffer, 2> buffers_;
  std::array<int32_t, 2> loaded_ = {-1, -1};  // the layer in each, or being copied; -1: none
  std::vector<Streamed> streamed_;            // layers n_kept() and up
};

class MappedExperts final : public WeightResidency {
 public:
  // The smallest valid max_resident: dense weights and all experts of the largest layer, which a
  // prompt may need at once.
  static size_t least(const ModelTensors& tensors) {
    size_t largest = 0;
    for (const LayerTensors& layer : tensors.experts) largest = std::max(largest, bytes_of(layer));
    return bytes_of(tensors.dense()) + largest;
  }

  MappedExperts(const ModelTensors& tensors, size_t max_resident)
      : WeightResidency(Unit::experts), layers_(tensors.experts.size()) {
    const int32_t n_experts = tensors.n_experts;
    require(max_resident >= least(tensors), "max_resident is ", max_resident,
            " bytes; the dense weights and the experts of one layer take ", least(tensors));
    size_t all = 0;
    for (size_t l = 0; l < layers_.size(); ++l) {
      layers_[l].experts.resize(n_experts);
      for (const Tensor* matrices : tensors.experts[l]) {
        const size_t size = static_cast<size_t>(matrices->bytes()) / n_experts;
        for (int32_t e = 0; e < n_experts; ++e) {
          layers_[l].experts[e].matrices.emplace_back(matrices->data + e * size, size);
        }
      }
      all += bytes_of(tensors.experts[l]);
    }
    loaded_.reserve(n_experts);
    const std::vector<Tensor*> dense = tensors.dense();
    for (const Tensor* tensor : dense) MappedFile::populate(tensor->memory());

    if (max_resident >= bytes_of(dense) + all) {
      n_kept_experts_ = n_experts;
      for (const LayerTensors& layer : tensors.experts) populate(ranges_of(layer));
    } else {  // one more expert of every layer at a time while they fit
      n_kept_experts_ = static_cast<int32_t>((max_resident - least(tensors)) / (all / n_experts));
    }
  }

  // Blocks until the experts with rows are in memory.
  void prepare_experts(int32_t l, std::span<const int32_t> offsets) override {
    Layer& layer = layers_[l];
    const auto n_experts = static_cast<uint32_t>(layer.experts.size());
    if (n_kept_experts() == static_cast<int32_t>(n_experts)) return;
    if (current_ != nullptr && current_ != &layer) release_others(*current_);
    current_ = &layer;

    ++layer.passes;
    loaded_.clear();
    for (uint32_t e = 0; e < n_experts; ++e) {
      const auto rows = static_cast<uint32_t>(offsets[e + 1] - offsets[e]);
      if (rows == 0) continue;
      Expert& expert = layer.experts[e];
      ++n_needed_;
      expert.uses += rows;
      expert.last_use = layer.passes;
      if (expert.is_loaded) continue;
      // Together, so that storage can read several at a time.
      for (const Bytes& bytes : expert.matrices) MappedFile::prefetch(bytes);
      loaded_.push_back(&expert);
    }
    for (Expert* expert : loaded_) {
      populate(expert->matrices);
      expert->is_loaded = true;
      ++n_read_;
    }

    layer.routed += static_cast<uint32_t>(offsets[n_experts]);
    if (layer.routed >= kRowsOfExpert * n_experts) {
      layer.routed = 0;
      for (Expert& expert : layer.experts) expert.uses /= 2;
    }
  }

 private:
  // Uses of experts are halved when each has had this many rows on average, because usage changes
  // with the input.
  static constexpr uint32_t kRowsOfExpert = 16;

  struct Expert {
    std::vector<Bytes> matrices;
    bool is_loaded = false;
    uint32_t uses = 0;      // rows routed to it recently
    uint64_t last_use = 0;  // index of the pass
  };

  struct Layer {
    std::vector<Expert> experts;
    uint32_t routed = 0;  // rows routed to its experts since uses were halved
    uint64_t passes = 0;
  };

  void release_others(Layer& layer) {  // all except the resident ones
    loaded_.clear();
    for (Expert& expert : layer.experts) {
      if (expert.is_loaded) loaded_.push_back(&expert);
    }
    if (std::ssize(loaded_) <= n_kept_experts()) return;
    std::ranges::nth_element(
        loaded_, loaded_.begin() + n_kept_experts(), std::greater{},
        [](const Expert* expert) { return std::tuple(expert->uses, expert->last_use, expert); });
    for (auto it = loaded_.begin() + n_kept_experts(); it != loaded_.end(); ++it) {
      release((*it)->matrices);
      (*it)->is_loaded = false;
    }
  }

  std::vector<Layer> layers_;
  Layer* current_ = nullptr;  // may have more than n_kept_experts() experts in memory
  std::vector<Expert*> loaded_;
};

class CopiedExperts final : public WeightResidency {
 public:
  CopiedExperts(Backend& backend, const ModelTensors& tensors, size_t max_resident)
      : WeightResidency(Unit::experts), backend_(backend) {
    size_t resident = bytes_of(backend, tensors.dense());
    require(max_resident >= resident, "max_resident is ", max_resident,
            " bytes; the dense weights take ", resident);
    for (const LayerTensors& layer : tensors.experts) {
      const size_t size = bytes_of(backend, layer);
      if (size > max_resident - resident) break;
      resident += size;
      ++n_kept_;
    }
    for (int32_t l = n_kept(); l < std::ssize(tensors.layers); ++l) {
      for (size_t i = 0; i < tensors.layers[l].size(); ++i) {
        if (std::ranges::count(tensors.experts[l], tensors.layers[l][i]) > 0)
          in_host_.emplace(l, i);
      }
    }
    backend.expect_weights(resident);
  }

  ~CopiedExperts() override {
    try {
      backend_.finish();  // operations may still read or rearrange them
    } catch (...) {
      // A failed device runs nothing.
    }
  }

  std::optional<Tensor> place(int32_t layer, size_t i, const Tensor& host) override {
    if (!in_host_.contains({layer, i})) return std::nullopt;
    owned_.push_back(backend_.allocate_host(backend_.upload_bytes(host)));
    return backend_.upload(host, owned_.back().data());
  }

 private:
  Backend& backend_;
  std::set<std::pair<int32_t, size_t>> in_host_;  // layers, and indexes of their tensors
  std::vector<Buffer> owned_;
};

}  // namespace

std::vector<Tensor*> ModelTensors::all() const {
  std::vector<Tensor*> all = others;
  for (const LayerTensors& layer : layers) all.insert(all.end(), layer.begin(), layer.end());
  return all;
}

std::vector<Tensor*> ModelTensors::dense() const {
  std::vector<Tensor*> dense = others;
  for (size_t l = 0; l < layers.size(); ++l) {
    std::ranges::copy_if(layers[l], std::back_inserter(dense), [&](const Tensor* tensor) {
      return std::ranges::count(experts[l], tensor) == 0;
    });
  }
  return dense;
}

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

void WeightResidency::keep_layers(const std::vector<size_t>& sizes, size_t others,
                                  size_t max_resident, size_t place) {
  for (const size_t size : sizes) place = std::max(place, size);
  const size_t least = others + 2 * place;
  require(max_resident >= least, "max_resident is ", max_resident,
          " bytes; two layers and the tensors outside of layers take ", least);

  const auto n_layers = static_cast<int32_t>(sizes.size());
  size_t left = max_resident - least;
  while (n_kept_ < n_layers && sizes[n_kept_] <= left) left -= sizes[n_kept_++];
  // With at most two streamed layers, all layers fit.
  if (n_layers - n_kept_ <= 2) n_kept_ = n_layers;
  n_streamed_ = n_layers - n_kept_;
  streamed_bytes_ = std::accumulate(sizes.begin() + n_kept_, sizes.end(), size_t{0});
}

int32_t WeightResidency::next(int32_t layer) const {
  return layer + 1 < n_kept_ + n_streamed_ ? std::max(layer + 1, n_kept_) : n_kept_;
}

std::unique_ptr<WeightResidency> make_residency(Backend& backend, const ModelTensors& tensors,
                                                size_t max_resident) {
  const bool mapped = backend.capabilities().mapped_weights;
  require(!mapped || MappedFile::can_release(), "max_resident: this system cannot release pages");
  const auto bytes = [&](const std::vector<Tensor*>& some) {
    return mapped ? bytes_of(some) : bytes_of(backend, some);
  };
  bool experts = tensors.n_experts > 0;
  if (experts) {
    size_t largest = 0;
    for (const LayerTensors& layer : tensors.layers) largest = std::max(largest, bytes(layer));
    const size_t least = mapped ? MappedExperts::least(tensors) : bytes(tensors.dense());
    experts = max_resident >= least || bytes(tensors.others) + 2 * largest >= least;
  }
  if (experts && mapped) return std::make_unique<MappedExperts>(tensors, max_resident);
  if (experts) return std::make_unique<CopiedExperts>(backend, tensors, max_resident);
  if (mapped) return std::make_unique<MappedLayers>(tensors, max_resident);
  return std::make_unique<CopiedLayers>(backend, tensors, max_resident);
}

}  // namespace h2o
