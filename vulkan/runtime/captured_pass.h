// Decode passes that are recorded once and submitted again.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <tuple>

#include "backend/backend.h"
#include "vulkan/runtime/commands.h"

namespace h2o::vulkan {

// One recording per size of a batch: whatever else varies is read from memory. Of the last
// kMostRecordings sizes used.
class CapturedPass final : public CapturedGraph {
 public:
  static constexpr size_t kMostRecordings = 32;

  // Submits the pass, which is recorded if there is no recording for this batch.
  void run(Commands& commands, const Batch& batch, const std::function<void()>& pass);

 private:
  using Sizes = std::tuple<size_t, size_t, size_t>;  // rows, logits, temperatures
  struct Entry {
    std::unique_ptr<Recording> recording;
    uint64_t last_run = 0;
  };

  std::map<Sizes, Entry> entries_;
  uint64_t n_runs_ = 0;
};

}  // namespace h2o::vulkan
