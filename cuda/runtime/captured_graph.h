// CUDA graphs of decode steps: captured once, then replayed with one launch.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

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

// Steps with identical launches: the same number of rows, with rolling sequences, with others, or
// both, slots in use, and turns.
struct StepKind {
  int32_t n_rows;
  bool fixed, rolling;
  int32_t in_use;
  std::vector<int32_t> turns;  // as Batch::turns
  auto operator<=>(const StepKind&) const = default;
};

// One graph per kind of step, of the last kMaxGraphs kinds used: a graph of a large model takes
// some hundred KiB of device memory. The first step runs without capture, because the driver may
// still load kernels; the second is captured; later ones are replayed. If capture or replay fails,
// steps run without a graph.
class GraphCache final : public CapturedGraph {
 public:
  static constexpr int kMaxGraphs = 32;

  ~GraphCache() override;

  void run(const Stream& stream, GraphSwitch& graphs, const StepKind& step,
           const std::function<void()>& pass);

 private:
  struct Entry {
    cudaGraphExec_t graph = nullptr;  // or has run once, or was dropped
    uint64_t last_run = 0;
  };

  void drop_oldest(const Stream& stream);

  std::map<StepKind, Entry> entries_;
  int n_graphs_ = 0;
  uint64_t n_runs_ = 0;
};

}  // namespace h2o::cuda
