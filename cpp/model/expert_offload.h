// ExpertOffload: a mixture-of-experts model of which only some experts are in memory.
//
// Dense weights stay resident. Of each layer the most used experts stay, and the others are read
// from the mapped file when rows are routed to them and released when the next layer needs memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "model/layer_offload.h"

namespace h2o {

class ExpertOffload {
 public:
  // The smallest valid max_resident: `dense` plus all experts of the largest layer, which a prompt
  // may need at once.
  static size_t least(const std::vector<LayerTensors>& layers, const std::vector<Tensor*>& dense);

  // layers: for each layer the matrices of all its experts. dense: all other tensors. All must be
  // in mapped files. Throws InvalidArgument if max_resident is less than least(), or if the system
  // does not support it.
  ExpertOffload(const std::vector<LayerTensors>& layers, int32_t n_experts,
                const std::vector<Tensor*>& dense, size_t max_resident);

  // Blocks until the experts with rows are in memory: expert e has rows [offsets[e], offsets[e +
  // 1]).
  void load(int32_t layer, std::span<const int32_t> offsets);

  int32_t n_kept() const { return n_kept_; }  // resident experts per layer

  // Experts that passes needed, and how many of them had to be read.
  int64_t n_needed() const { return n_needed_; }
  int64_t n_read() const { return n_read_; }

 private:
  struct Expert {
    std::vector<std::span<const std::byte>> matrices;
    bool is_here = false;
    uint32_t uses = 0;      // rows routed to it recently
    uint64_t last_use = 0;  // index of the pass
  };

  struct Layer {
    std::vector<Expert> experts;
    uint32_t routed = 0;  // rows routed to its experts since uses were halved
    uint64_t passes = 0;
  };

  void release_others(Layer& layer);  // all except the resident ones

  std::vector<Layer> layers_;
  int32_t n_kept_ = 0;
  Layer* current_ = nullptr;  // may have more than n_kept_ experts in memory
  std::vector<Expert*> here_;
  int64_t n_needed_ = 0;
  int64_t n_read_ = 0;
};

}  // namespace h2o
