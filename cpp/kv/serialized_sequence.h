// A sequence of the cache as bytes: what a snapshot holds of it.
#pragma once

#include <cstdint>

#include "core/bytes.h"
#include "kv/cache.h"

namespace h2o {

// Appends the shape of the cache, the policies of a sequence and everything kept of it, but not its
// length.
void write_sequence(const KvCache& cache, int32_t sequence, ByteWriter& writer);

// Replaces a sequence by what write_sequence() wrote of one of `length` tokens. Whatever follows is
// what would have followed there, bit for bit.
// Throws FormatError, and has then changed nothing, for bytes that are not such a sequence, and for
// a cache of another shape or a sequence of another policy.
void read_sequence(KvCache& cache, int32_t sequence, int32_t length, ByteReader& reader);

}  // namespace h2o
