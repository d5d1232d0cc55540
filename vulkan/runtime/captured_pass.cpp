#include "vulkan/runtime/captured_pass.h"

#include <algorithm>
#include <utility>

namespace h2o::vulkan {

void CapturedPass::run(Commands& commands, const Batch& batch, const std::function<void()>& pass) {
  const Sizes sizes{batch.tokens.size(), batch.logits_rows.size(), batch.temperatures.size()};
  auto found = entries_.find(sizes);
  if (found == entries_.end()) {
    std::unique_ptr<Recording> recording;
    try {
      commands.capture();
      pass();
      recording = commands.take();
    } catch (...) {
      commands.drop();
      throw;
    }
    if (entries_.size() == kMostRecordings) {
      const auto last_run = [](const auto& entry) { return entry.second.last_run; };
      entries_.erase(std::ranges::min_element(entries_, {}, last_run));
    }
    found = entries_.emplace(sizes, Entry{std::move(recording)}).first;
  }
  found->second.last_run = ++n_runs_;
  commands.submit(*found->second.recording);
}

}  // namespace h2o::vulkan
