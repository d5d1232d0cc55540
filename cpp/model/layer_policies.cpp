#include "model/layer_policies.h"

#include <algorithm>

namespace h2o {

std::vector<KvPolicy> layer_policies(const Config& config, std::span<const KvPolicy> policies) {
  std::vector<KvPolicy> all(policies.begin(), policies.end());
  const bool valid = all.size() == 1 || std::ssize(all) == config.n_layers;
  if (valid && all.size() > 1) {
    for (int32_t l = 0; l < config.n_layers; ++l) all[l] = all[config.kv_source(l)];
  }
  if (config.family->encoder) return all;  // whose windows are not those of a cache
  if (config.sliding_window.size == 0 || !valid) return all;  // the cache throws for invalid sizes
  if (all.size() == 1) all.resize(config.n_layers, all[0]);
  for (int32_t l = 0; l < config.n_layers; ++l) {
    const int32_t window = config.window(l);
    if (window == 0) continue;
    validate(all[l]);
    // The token that attends is not part of the budget.
    const int64_t newest = std::min<int64_t>(all[l].budget(), window - 1);
    all[l] = {.sinks = 0, .heavy = 0, .recent = static_cast<int32_t>(newest)};
  }
  return all;
}

std::vector<KvPolicy> protected_policies(const Config& config, std::span<const KvPolicy> policies,
                                         const Protection& protection, int32_t n_prompt) {
  std::vector<KvPolicy> all = layer_policies(config, policies);
  for (int32_t l = 0; l < std::ssize(all); ++l) {
    if (config.window(l) > 0) continue;
    all[l] = protected_policy(all[l], protection, n_prompt);
  }
  return all;
}

}  // namespace h2o
