// Decode steps as CUDA graphs: recorded the first times, then replayed with one launch.
#pragma once

#include <functional>
#include <map>

#include "backend/backend.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

// One graph for each number of rows. A step of that many rows runs as it is the first time, when
// the driver may still load kernels, is recorded the second time, and replayed from then on.
class GraphCache final : public CapturedGraph {
 public:
  ~GraphCache() override;

  void run(const Stream& stream, int32_t n_rows, const std::function<void()>& pass);

 private:
  std::map<int32_t, cudaGraphExec_t> graphs_;  // nullptr: ran once
};

}  // namespace h2o::cuda
