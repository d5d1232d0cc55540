// Splits the tensors of a mixture-of-experts model into experts, which may be offloaded, and dense
// weights.
#pragma once

#include <vector>

#include "model/layer_offload.h"

namespace h2o {

struct Layer;

struct ExpertSplit {
  std::vector<LayerTensors> experts;  // for each layer, the matrices of all its experts
  std::vector<Tensor*> dense;         // all other tensors
};

// tensors: per layer; others: outside of layers.
ExpertSplit split_experts(std::vector<Layer>& layers, const std::vector<LayerTensors>& tensors,
                          const std::vector<Tensor*>& others);

}  // namespace h2o
