// The policy of each layer, limited by its attention window.
#pragma once

#include <span>
#include <vector>

#include "kv/budget.h"
#include "kv/policy.h"
#include "model/config.h"

namespace h2o {

// Expands policies, one or one per layer, to one per layer as the model needs them. A layer with a
// window keeps the newest tokens inside it, at most its policy's budget: older tokens are never
// attended to, whatever their score.
std::vector<KvPolicy> layer_policies(const Config& config, std::span<const KvPolicy> policies);

// protected_policy() for each layer without a window, the others as they are. `policies`: one per
// layer.
std::vector<KvPolicy> protected_policies(const Config& config, std::span<const KvPolicy> policies,
                                         const Protection& protection, int32_t n_prompt);

}  // namespace h2o
