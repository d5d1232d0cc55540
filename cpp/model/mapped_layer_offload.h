// MappedLayerOffload: layers that are used in place from the mapped file. A thread reads the pages
// of the next layer and releases those of the previous one.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <thread>

#include "core/process.h"
#include "model/layer_offload.h"

namespace h2o {

class MappedLayerOffload final : public LayerOffload {
 public:
  // Also throws InvalidArgument if the system does not support it.
  MappedLayerOffload(const std::vector<LayerTensors>& layers, const std::vector<Tensor*>& others,
                     size_t max_resident);
  ~MappedLayerOffload() override;

  // Blocks until the layer is in memory.
  void prepare(int32_t layer) override;

 private:
  using Bytes = std::span<const std::byte>;

  void load(int32_t layer);  // runs on the thread
  void work();

  // What the thread shares. In a forked child, which lacks the thread, it cannot be destroyed.
  struct Prefetch {
    std::mutex mutex;  // guards the members below
    std::condition_variable changed;
    int32_t wanted = -1;   // the layer being prefetched
    bool is_here = false;  // `wanted` is in memory
    bool ended = false;
    std::thread thread;
  };

  const int64_t process_ = process_id();
  std::vector<std::vector<Bytes>> layers_;  // byte ranges of each layer's tensors
  int32_t current_ = -1;                    // the streamed layer that computes now
  std::unique_ptr<Prefetch> prefetch_ = std::make_unique<Prefetch>();
};

}  // namespace h2o
