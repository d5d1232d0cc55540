// ExpertOffload: a model with mixtures of experts, of which only some experts are in memory.
//
// Everything else stays: every token needs it. Of each layer the most used experts stay, and the
// others are read from the mapped file when rows are sent to them. They are let go of when the next
// layer needs room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "model/layer_offload.h"

namespace h2o {

class ExpertOffload {
 public:
  // The fewest bytes that it works with: `dense`, and all experts of the largest layer, for a
  // prompt may need them all.
  static size_t least(const std::vector<LayerTensors>& layers, const std::vector<Tensor*>& dense);

  // layers: of each the matrices of all its experts. dense: all tensors that stay. All of them lie
  // in mapped files. Throws InvalidArgument if max_resident is less than least(), or if the system
  // cannot do it.
  ExpertOffload(const std::vector<LayerTensors>& layers, int32_t n_experts,
                const std::vector<Tensor*>& dense, size_t max_resident);

  // Returns when the experts that rows are sent to are in memory: expert e gets the rows from
  // offsets[e] to offsets[e + 1].
  void bring(int32_t layer, std::span<const int32_t> offsets);

  int32_t n_kept() const { return n_kept_; }  // experts of each layer that stay

  // Experts that passes needed, and those of them that were not in memory.
  int64_t n_needed() const { return n_needed_; }
  int64_t n_read() const { return n_read_; }

 private:
  struct Expert {
    std::vector<std::span<const std::byte>> matrices;
    bool is_here = false;
    uint32_t uses = 0;      // rows that were sent to it lately
    uint64_t last_use = 0;  // number of the pass
  };

  struct Layer {
    std::vector<Expert> experts;
    uint32_t routed = 0;  // rows that were sent to its experts since uses were halved
    uint64_t passes = 0;
  };

  void release_others(Layer& layer);  // than those that stay

  std::vector<Layer> layers_;
  int32_t n_kept_ = 0;
  Layer* current_ = nullptr;  // of which more than n_kept_ experts may be in memory
  std::vector<Expert*> here_;
  int64_t n_needed_ = 0;
  int64_t n_read_ = 0;
};

}  // namespace h2o
