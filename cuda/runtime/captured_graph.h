// Decode steps as CUDA graphs: recorded the first times, then replayed with one launch.
#pragma once

#include <compare>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "backend/backend.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

// Whether a back end's steps are recorded: until H2O_CUDA_GRAPHS=0 or one could not be, and then
// never again.
class GraphSwitch {
 public:
  GraphSwitch();

  void turn_off(std::string reason);  // the first one stays
  std::string reason() const;         // empty while it is on

 private:
  mutable std::mutex mutex_;  // any thread may ask
  std::string reason_;
};

// Steps whose launches are the same: of so many rows, and with rolling sequences, others, or both.
struct StepKind {
  int32_t n_rows;
  bool fixed, rolling;
  auto operator<=>(const StepKind&) const = default;
};

// One graph for each kind of step. The step runs as it is the first time, when
// the driver may still load kernels, is recorded the second time, and replayed from then on. When
// it cannot be recorded or replayed, it runs as it is.
class GraphCache final : public CapturedGraph {
 public:
  ~GraphCache() override;

  void run(const Stream& stream, GraphSwitch& graphs, const StepKind& step,
           const std::function<void()>& pass);

 private:
  std::map<StepKind, cudaGraphExec_t> graphs_;  // nullptr: ran once
};

}  // namespace h2o::cuda
