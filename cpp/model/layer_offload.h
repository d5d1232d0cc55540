// LayerOffload: a model of which only a part is at a time where it is computed on.
//
// Every pass reads the layers in the same order, so to keep the newest would keep what is wanted
// last. The first layers stay, as many as fit, and the others take turns: while one computes, the
// next one that does not stay is brought in. A batch shares what that costs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/tensor.h"

namespace h2o {

// The tensors of a layer, always in the same order; an empty one where it has none.
using LayerTensors = std::vector<Tensor*>;

class LayerOffload {
 public:
  virtual ~LayerOffload() = default;
  LayerOffload(const LayerOffload&) = delete;
  LayerOffload& operator=(const LayerOffload&) = delete;

  // The layer is about to be computed: what is asked of the back end from now on finds it there.
  virtual void enter(int32_t layer) = 0;

  int32_t n_layers() const { return static_cast<int32_t>(sizes_.size()); }
  int32_t n_streamed() const { return n_layers() - n_kept_; }  // layers that do not stay
  size_t streamed_bytes() const;                               // of them: what every pass reads

 protected:
  // Of layers of these sizes, and `others` bytes in no layer, at most max_resident bytes are to be
  // there: those others, the layers that stay, and two places for those that take turns, each of
  // `place` bytes or as many as the largest layer. Throws InvalidArgument, with the numbers, if
  // that is too little.
  LayerOffload(std::vector<size_t> sizes, size_t others, size_t max_resident, size_t place = 0);

  int32_t n_kept() const { return n_kept_; }
  size_t size(int32_t layer) const { return sizes_[layer]; }

  // The next one, after this one, that does not stay.
  int32_t next(int32_t layer) const;

 private:
  std::vector<size_t> sizes_;
  int32_t n_kept_ = 0;
};

}  // namespace h2o
