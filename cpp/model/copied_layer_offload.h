// CopiedLayerOffload: layer offload for a back end with its own memory. Streamed layers are kept in
// host memory, in the back end's layout, and copied while it computes.
#pragma once

#include <array>

#include "backend/backend.h"
#include "model/layer_offload.h"

namespace h2o {

// A layer always uses the same one of two buffers, so that its tensors' addresses never change.
class CopiedLayerOffload final : public LayerOffload {
 public:
  // others: bytes on the back end of tensors outside of layers. Throws OutOfMemory.
  CopiedLayerOffload(Backend& backend, const std::vector<LayerTensors>& layers, size_t others,
                     size_t max_resident);
  ~CopiedLayerOffload() override;

  bool streams(int32_t layer) const { return layer >= n_kept(); }

  // Prepares the i-th tensor of a streamed layer. Returns the tensor at its future address.
  Tensor upload(int32_t layer, size_t i, const Tensor& host);

  void prepare(int32_t layer) override;

 private:
  struct Streamed {
    Buffer host;
    size_t filled = 0;  // bytes used
    std::vector<HostCopy> copies;
  };

  int32_t buffer_of(int32_t layer) const { return (layer - n_kept()) % 2; }
  void copy(int32_t layer);

  Backend& backend_;
  // of the i-th tensor of any layer in its buffer; last: the total size
  std::vector<size_t> offsets_;
  std::array<Buffer, 2> buffers_;           // on the back end
  std::array<int32_t, 2> here_ = {-1, -1};  // the layer in each, or being copied; -1: none
  std::vector<Streamed> streamed_;          // layers n_kept() and up
};

}  // namespace h2o
