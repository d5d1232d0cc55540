// CUDA graphs of decode steps: captured once, then replayed with one launch.
#pragma once

#include <compare>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "backend/backend.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

// Whether a back end captures steps. Disabled permanently by H2O_CUDA_GRAPHS=0 or by the first
// failed capture.
class GraphSwitch {
 public:
  GraphSwitch();

  void turn_off(std::string reason);  // only the first reason is kept
  std::string reason() const;         // empty while enabled

 private:
  mutable std::mutex mutex_;  // any thread may read the reason
  std::string reason_;
};

// Steps with identical launches: the same number of rows, and with rolling sequences, with others,
// or both.
struct StepKind {
  int32_t n_rows;
  bool fixed, rolling;
  auto operator<=>(const StepKind&) const = default;
};

// One graph per kind of step. The first step runs without capture, because the driver may still
// load kernels; the second is captured; later ones are replayed. If capture or replay fails, steps
// run without a graph.
class GraphCache final : public CapturedGraph {
 public:
  ~GraphCache() override;

  void run(const Stream& stream, GraphSwitch& graphs, const StepKind& step,
           const std::function<void()>& pass);

 private:
  std::map<StepKind, cudaGraphExec_t> graphs_;  // nullptr: has run once
};

}  // namespace h2o::cuda
