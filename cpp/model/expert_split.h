// What of a model with mixtures of experts may be left out of memory, and what may not.
#pragma once

#include <vector>

#include "model/layer_offload.h"

namespace h2o {

struct Layer;

struct ExpertSplit {
  std::vector<LayerTensors> experts;  // of each layer the matrices of all its experts
  std::vector<Tensor*> dense;         // all other tensors
};

// tensors: those of each layer; others: those in none.
ExpertSplit split_experts(std::vector<Layer>& layers, const std::vector<LayerTensors>& tensors,
                          const std::vector<Tensor*>& others);

}  // namespace h2o
