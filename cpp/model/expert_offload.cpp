#include "model/expert_offload.h"

#include <algorithm>
#include <functional>
#include <tuple>

#include "core/error.h"
#include "io/mapped_file.h"

namespace h2o {
namespace {

// Uses of experts are halved when each has had this many rows on average, because usage changes
// with the input.
constexpr uint32_t kRowsOfExpert = 16;

using Bytes = std::span<const std::byte>;

}  // namespace

size_t ExpertOffload::least(const std::vector<LayerTensors>& layers,
                            const std::vector<Tensor*>& dense) {
  size_t largest = 0;
  for (const LayerTensors& layer : layers) largest = std::max(largest, bytes_of(layer));
  return bytes_of(dense) + largest;
}

ExpertOffload::ExpertOffload(const std::vector<LayerTensors>& layers, int32_t n_experts,
                             const std::vector<Tensor*>& dense, size_t max_resident)
    : layers_(layers.size()) {
  require(MappedFile::can_release(), "max_resident: this system cannot release pages");
  const size_t least = ExpertOffload::least(layers, dense);
  require(max_resident >= least, "max_resident is ", max_resident,
          " bytes; the dense weights and the experts of one layer take ", least);

  for (size_t l = 0; l < layers.size(); ++l) {
    layers_[l].experts.resize(n_experts);
    for (int32_t e = 0; e < n_experts; ++e) {
      for (const Tensor* matrices : layers[l]) {
        const size_t size = static_cast<size_t>(matrices->bytes()) / n_experts;
        layers_[l].experts[e].matrices.emplace_back(matrices->data + e * size, size);
      }
    }
  }
  here_.reserve(n_experts);
  for (const Tensor* tensor : dense) MappedFile::populate(tensor->memory());

  // Keep one more expert of every layer at a time while they fit.
  size_t all = 0;
  for (const LayerTensors& layer : layers) all += bytes_of(layer);
  if (max_resident >= bytes_of(dense) + all) {
    n_kept_ = n_experts;
    for (const LayerTensors& layer : layers) {
      for (const Tensor* tensor : layer) MappedFile::populate(tensor->memory());
    }
  } else {
    n_kept_ = static_cast<int32_t>((max_resident - least) / (all / n_experts));
  }
}

void ExpertOffload::load(int32_t l, std::span<const int32_t> offsets) {
  Layer& layer = layers_[l];
  const auto n_experts = static_cast<uint32_t>(layer.experts.size());
  if (n_kept_ == static_cast<int32_t>(n_experts)) return;
  if (current_ != nullptr && current_ != &layer) release_others(*current_);
  current_ = &layer;

  ++layer.passes;
  here_.clear();  // experts being read
  for (uint32_t e = 0; e < n_experts; ++e) {
    const auto rows = static_cast<uint32_t>(offsets[e + 1] - offsets[e]);
    if (rows == 0) continue;
    Expert& expert = layer.experts[e];
    ++n_needed_;
    expert.uses += rows;
    expert.last_use = layer.passes;
    if (expert.is_here) continue;
    // Together, so that storage can read several at a time.
    for (const Bytes& bytes : expert.matrices) MappedFile::prefetch(bytes);
    here_.push_back(&expert);
  }
  for (Expert* expert : here_) {
    for (const Bytes& bytes : expert->matrices) MappedFile::populate(bytes);
    expert->is_here = true;
    ++n_read_;
  }

  layer.routed += static_cast<uint32_t>(offsets[n_experts]);
  if (layer.routed >= kRowsOfExpert * n_experts) {
    layer.routed = 0;
    for (Expert& expert : layer.experts) expert.uses /= 2;
  }
}

void ExpertOffload::release_others(Layer& layer) {
  here_.clear();
  for (Expert& expert : layer.experts) {
    if (expert.is_here) here_.push_back(&expert);
  }
  if (std::ssize(here_) <= n_kept_) return;
  std::ranges::nth_element(
      here_, here_.begin() + n_kept_, std::greater{},
      [](const Expert* expert) { return std::tuple(expert->uses, expert->last_use, expert); });
  for (auto it = here_.begin() + n_kept_; it != here_.end(); ++it) {
    for (const Bytes& bytes : (*it)->matrices) MappedFile::release(bytes);
    (*it)->is_here = false;
  }
}

}  // namespace h2o
