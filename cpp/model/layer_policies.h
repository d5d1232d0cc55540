// What the layers of a model keep, which is for windows of attention to say too.
#pragma once

#include <span>
#include <vector>

#include "kv/policy.h"
#include "model/config.h"

namespace h2o {

// The policies, one or one for each layer, as the layers of the model need them. One with a window
// keeps the newest tokens in it, and of them no more than its policy's budget: none that is older
// is attended to, however much attention it received before.
std::vector<KvPolicy> layer_policies(const Config& config, std::span<const KvPolicy> policies);

}  // namespace h2o
