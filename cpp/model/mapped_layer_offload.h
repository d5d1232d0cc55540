// MappedLayerOffload: layers that are computed on where the mapped file has them. A thread has
// their pages read, and those of the layer before are let go of.
#pragma once

#include <condition_variable>
#include <mutex>
#include <span>
#include <thread>

#include "model/layer_offload.h"

namespace h2o {

class MappedLayerOffload final : public LayerOffload {
 public:
  // Throws InvalidArgument also where the system cannot do it.
  MappedLayerOffload(const std::vector<LayerTensors>& layers, const std::vector<Tensor*>& others,
                     size_t max_resident);
  ~MappedLayerOffload() override;

  // Returns when it is in memory.
  void enter(int32_t layer) override;

 private:
  using Bytes = std::span<const std::byte>;

  void bring(int32_t layer);  // by the thread
  void work();

  std::vector<std::vector<Bytes>> layers_;  // of each the tensors' bytes
  int32_t current_ = -1;                    // of those that take turns, the one that computes

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  int32_t wanted_ = -1;   // the one after it
  bool is_here_ = false;  // wanted_ is in memory
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace h2o
