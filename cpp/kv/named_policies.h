// Policies by name, for a number of tokens to keep.
#pragma once

#include <string_view>
#include <vector>

#include "kv/policy.h"

namespace h2o {

// In the order in which they are listed to users.
std::vector<std::string_view> policy_names();

// The policy of this name that keeps n tokens. Throws InvalidArgument for unknown names and n < 1.
KvPolicy named_policy(std::string_view name, int32_t n);

}  // namespace h2o
