// A sequence of the cache as bytes: what a snapshot holds of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/bytes.h"
#include "kv/cache.h"

namespace h2o {

// Appends the shape of the cache, the policies of a sequence and everything kept of it, but not its
// length.
void write_sequence(const KvCache& cache, int32_t sequence, ByteWriter& writer);

// How many bytes that are, about, without an archive.
size_t sequence_bytes(const KvCache& cache, int32_t sequence);

// Replaces a sequence by what write_sequence() wrote of one of `length` tokens. Whatever follows is
// what would have followed there, bit for bit.
// n_tokens: only its first ones, of a sequence that has evicted nothing and has no scores.
// Throws FormatError, and has then changed nothing, for bytes that are not such a sequence, and for
// a cache of another shape or a sequence of another policy.
void read_sequence(KvCache& cache, int32_t sequence, int32_t length, ByteReader& reader,
                   std::optional<int32_t> n_tokens = std::nullopt);

}  // namespace h2o
