#include "model/expert_split.h"

#include <algorithm>
#include <iterator>

#include "model/weights.h"

namespace h2o {

ExpertSplit split_experts(std::vector<Layer>& layers, const std::vector<LayerTensors>& tensors,
                          const std::vector<Tensor*>& others) {
  ExpertSplit split{.experts = {}, .dense = others};
  for (size_t l = 0; l < layers.size(); ++l) {
    Mixture& m = layers[l].mixture;
    split.experts.push_back({&m.gate.weight, &m.up.weight, &m.down.weight});
    std::ranges::copy_if(tensors[l], std::back_inserter(split.dense), [&](const Tensor* tensor) {
      return std::ranges::find(split.experts.back(), tensor) == split.experts.back().end();
    });
  }
  return split;
}

}  // namespace h2o
