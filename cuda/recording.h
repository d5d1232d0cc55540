// Decode steps as CUDA graphs: recorded the first times, then replayed with one launch.
#pragma once

#include <functional>
#include <map>

#include "core/backend.h"
#include "cuda/device.h"

namespace h2o::cuda {

// One graph for each number of rows. A step of that many rows runs as it is the first time, when
// the driver may still load kernels, is recorded the second time, and replayed from then on.
class GraphRecording final : public Recording {
 public:
  ~GraphRecording() override;

  void run(const Stream& stream, int32_t n_rows, const std::function<void()>& pass);

 private:
  std::map<int32_t, cudaGraphExec_t> graphs_;  // nullptr: ran once
};

}  // namespace h2o::cuda
