// Fills a bounded cache from a full one that has read the same tokens.
#pragma once

#include <cstdint>

#include "kv/cache.h"

namespace h2o {

// Replaces the content of a sequence by the tokens that its policy keeps of all that `full`'s
// sequence 0 has: sinks, recent ones, and those with the largest scores there. Keys, values and
// scores are copied.
//
// Requires host memory, layers of the same heads and types, original positions, a policy that does
// not weigh values, and no archive. Throws InvalidArgument, std::bad_alloc without changing
// anything.
void fill_sequence(KvCache& cache, int32_t sequence, const KvCache& full);

}  // namespace h2o
