// LayerOffload: runs a model of which only some layers are resident at a time.
//
// Every pass uses the layers in the same order, so a least-recently-used cache would always miss.
// Instead the first layers stay resident, as many as fit, and the others are streamed: while one
// computes, the next one is transferred. All rows of a batch share that cost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/tensor.h"

namespace h2o {

class Backend;

// The tensors of a layer in a fixed order; missing ones are empty.
using LayerTensors = std::vector<Tensor*>;

// Their size in the file, and that of a back end's copies of them.
size_t bytes_of(const std::vector<Tensor*>& tensors);
size_t bytes_of(const Backend& backend, const std::vector<Tensor*>& tensors);

class LayerOffload {
 public:
  virtual ~LayerOffload() = default;
  LayerOffload(const LayerOffload&) = delete;
  LayerOffload& operator=(const LayerOffload&) = delete;

  // Call before computing a layer: operations enqueued from now on find it resident.
  virtual void prepare(int32_t layer) = 0;

  int32_t n_layers() const { return static_cast<int32_t>(sizes_.size()); }
  int32_t n_streamed() const { return n_layers() - n_kept_; }  // layers that are not resident
  size_t streamed_bytes() const;  // their size: what every pass transfers

 protected:
  // At most max_resident bytes are resident: `others` (tensors outside of layers), the resident
  // layers, and two buffers for streamed layers, each of `place` bytes or the size of the largest
  // layer. Throws InvalidArgument, with the numbers, if that does not fit.
  LayerOffload(std::vector<size_t> sizes, size_t others, size_t max_resident, size_t place = 0);

  int32_t n_kept() const { return n_kept_; }
  size_t size(int32_t layer) const { return sizes_[layer]; }

  // The next streamed layer after this one, cyclically.
  int32_t next(int32_t layer) const;

 private:
  std::vector<size_t> sizes_;
  int32_t n_kept_ = 0;
};

}  // namespace h2o
