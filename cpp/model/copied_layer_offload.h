// CopiedLayerOffload: layers that a back end has copies of in its own memory. Those that take turns
// there are kept in the host's memory as they are to lie, and copied while the back end computes.
#pragma once

#include <array>

#include "backend/backend.h"
#include "model/layer_offload.h"

namespace h2o {

// A layer always goes to the same one of two places, so that its tensors never move.
class CopiedLayerOffload final : public LayerOffload {
 public:
  // others: the bytes of tensors in no layer, on the back end. Throws OutOfMemory.
  CopiedLayerOffload(Backend& backend, const std::vector<LayerTensors>& layers, size_t others,
                     size_t max_resident);
  ~CopiedLayerOffload() override;

  bool streams(int32_t layer) const { return layer >= n_kept(); }

  // Makes ready the i-th tensor of a layer that takes turns. Returns where it will be.
  Tensor upload(int32_t layer, size_t i, const Tensor& host);

  void enter(int32_t layer) override;

 private:
  struct Streamed {
    Buffer host;
    size_t filled = 0;  // bytes of it
    std::vector<HostCopy> copies;
  };

  int32_t place_of(int32_t layer) const { return (layer - n_kept()) % 2; }
  void copy(int32_t layer);

  Backend& backend_;
  std::vector<size_t> offsets_;   // in a place, of the i-th tensor of whichever layer; and its size
  std::array<Buffer, 2> places_;  // of the back end
  std::array<int32_t, 2> here_ = {-1, -1};  // the layer in each, or on its way; -1: none
  std::vector<Streamed> streamed_;          // the layers from n_kept() on
};

}  // namespace h2o
