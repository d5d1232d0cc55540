// WeightResidency: which weights are in memory, for a model whose weights do not fit.
//
// A back end that reads weights in place from the mapped file differs from one that copies them,
// and layers, which every pass uses in the same order, differ from experts, of which it needs few:
//
// - Layers, in place: the first ones stay, as many as fit. A thread reads the next of the others
//   while one computes, and the previous one is released. A least-recently-used cache would always
//   miss.
// - Layers, copied: the same, with the others in host memory. The next one is copied to one of two
//   buffers while one computes.
// - Experts, in place: dense weights stay, and of each layer the most used experts. The others are
//   read when rows are routed to them, and released when the next layer needs memory.
// - Experts, copied: dense weights are on the back end, and the experts of the first layers. The
//   others stay in host memory, where operations read them directly: copying whole layers would
//   take longer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backend/backend.h"

namespace h2o {

// The tensors of a layer in a fixed order; missing ones are empty.
using LayerTensors = std::vector<Tensor*>;

struct ModelTensors {
  std::vector<LayerTensors> layers;
  std::vector<Tensor*> others;        // outside of layers
  std::vector<LayerTensors> experts;  // the tensors of each layer that stack those of its experts
  int32_t n_experts = 0;

  std::vector<Tensor*> all() const;
  std::vector<Tensor*> dense() const;  // all except experts
};

// Their size in the file, and that of a back end's copies of them.
size_t bytes_of(const std::vector<Tensor*>& tensors);
size_t bytes_of(const Backend& backend, const std::vector<Tensor*>& tensors);

class WeightResidency {
 public:
  enum class Unit { layers, experts };

  virtual ~WeightResidency() = default;
  WeightResidency(const WeightResidency&) = delete;
  WeightResidency& operator=(const WeightResidency&) = delete;

  // Prepares the i-th tensor of a layer, if it is not to stay in the back end's memory. Returns the
  // tensor that operations read.
  virtual std::optional<Tensor> place(int32_t /*layer*/, size_t /*i*/, const Tensor& /*host*/) {
    return std::nullopt;
  }

  // Call before computing a layer: operations enqueued from now on find it resident.
  virtual void prepare(int32_t /*layer*/) {}

  // Call when rows of a layer have been routed: expert e has rows [offsets[e], offsets[e + 1]).
  virtual void prepare_experts(int32_t /*layer*/, std::span<const int32_t> /*offsets*/) {}

  Unit unit() const { return unit_; }
  int32_t n_kept() const { return n_kept_; }  // layers that are resident, with all their experts
  int32_t n_kept_experts() const { return n_kept_experts_; }  // of each layer, if read in place
  int32_t n_streamed() const { return n_streamed_; }  // layers that are transferred in every pass,
  size_t streamed_bytes() const { return streamed_bytes_; }  // and their size
  // Experts that passes needed, and how many of them had to be read.
  int64_t n_needed() const { return n_needed_; }
  int64_t n_read() const { return n_read_; }

 protected:
  explicit WeightResidency(Unit unit) : unit_(unit) {}

  // Keeps the first layers of these sizes. At most max_resident bytes are resident: `others`, the
  // resident layers, and two buffers for streamed layers, each of `place` bytes or the size of the
  // largest layer. Throws InvalidArgument, with the numbers, if that does not fit.
  void keep_layers(const std::vector<size_t>& sizes, size_t others, size_t max_resident,
                   size_t place = 0);

  bool streams(int32_t layer) const { return n_streamed_ > 0 && layer >= n_kept_; }
  int32_t next(int32_t layer) const;  // the streamed layer after this one, cyclically

  int32_t n_kept_ = 0;
  int32_t n_kept_experts_ = 0;
  int64_t n_needed_ = 0;
  int64_t n_read_ = 0;

 private:
  const Unit unit_;
  int32_t n_streamed_ = 0;
  size_t streamed_bytes_ = 0;
};

// At most max_resident bytes of weights are in memory. Experts are the unit unless there are none,
// or layers need less memory. Throws InvalidArgument, with the numbers, if that is too little or
// the system cannot release pages, and OutOfMemory.
std::unique_ptr<WeightResidency> make_residency(Backend& backend, const ModelTensors& tensors,
                                                size_t max_resident);

}  // namespace h2o
