// The KV heads that find facts far back, as ranked in the model file.
#pragma once

#include <cstdint>
#include <vector>

#include "io/gguf.h"
#include "model/config.h"

namespace h2o {

// The first `share` of the heads in h2o.retrieval_heads, at least one: layer * n_kv_heads +
// kv_head. Empty for a share of 1: all heads. Throws InvalidArgument for a share that is not above
// 0 and up to 1, and if the file has no ranking; FormatError if that is invalid.
std::vector<int32_t> retrieval_heads(const GgufFile& file, const Config& config, double share);

}  // namespace h2o
