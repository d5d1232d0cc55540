// WeightStream: a mapped model of which only a part is in memory at a time.
//
// Every pass reads the layers in the same order, so to keep the newest would keep what is wanted
// last. The first layers stay, as many as fit, and the others take turns: while one computes a
// thread brings in the next one that does not stay. A batch shares what that costs.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "io/gguf_model.h"

namespace h2o {

class WeightStream {
 public:
  // Of the weights of `file`, which has n_layers, at most max_resident bytes are to be in memory:
  // those of no layer, the layers that stay, and two others. Throws InvalidArgument, with the
  // numbers, if that is too little, and where the system cannot do it.
  WeightStream(const GgufModel& file, int32_t n_layers, size_t max_resident);
  ~WeightStream();

  // The layer is about to be computed. Returns when it is in memory.
  void enter(int32_t layer);

  int32_t n_streamed() const { return n_layers() - n_kept_; }  // layers that do not stay
  size_t streamed_bytes() const;                               // of them: what every pass reads

 private:
  using Bytes = std::span<const std::byte>;

  int32_t n_layers() const { return static_cast<int32_t>(layers_.size()); }
  void bring(int32_t layer);  // by the thread; -1: nothing
  void work();

  std::vector<std::vector<Bytes>> layers_;  // of each the tensors' bytes
  int32_t n_kept_ = 0;
  int32_t current_ = -1;  // of those that take turns, the one that computes

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  int32_t wanted_ = -1;   // the one after it
  bool is_here_ = false;  // wanted_ is in memory
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace h2o
