// Policies and types of the cache by the names that users give them.
#pragma once

#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "kv/policy.h"

namespace h2o {

// In the order in which they are listed to users.
std::vector<std::string_view> policy_names();

// The policy of this name that keeps n tokens. Throws InvalidArgument for unknown names and n < 1.
KvPolicy named_policy(std::string_view name, int32_t n);

// The one of kv_dtypes() with this lower-case name. Throws InvalidArgument, naming `argument`.
DType kv_dtype(std::string_view name, std::string_view argument = "kv_dtype");

// These do the same for archive_k_dtypes() and archive_v_dtypes().
DType archive_k_dtype(std::string_view name);
DType archive_v_dtype(std::string_view name);

}  // namespace h2o
