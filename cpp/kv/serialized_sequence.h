// Serialization of a sequence's KV cache, for snapshots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/bytes.h"
#include "kv/cache.h"

namespace h2o {

void write_policy(const KvPolicy& policy, ByteWriter& writer);
KvPolicy read_policy(ByteReader& reader);

// Appends the shape of the cache, the sequence's policies and its slots, but not its length.
void write_sequence(const KvCache& cache, int32_t sequence, ByteWriter& writer);

// The approximate size, without an archive.
size_t sequence_bytes(const KvCache& cache, int32_t sequence);

// Reads the shape and the policies. Throws FormatError if they are not those of this cache.
void check_shape(const KvCache& cache, int32_t sequence, ByteReader& reader);

// The policies of all layers. Throws FormatError if the shape is not that of this cache.
std::vector<KvPolicy> read_policies(const KvCache& cache, ByteReader reader);

// Replaces a sequence by one of `length` tokens that write_sequence() wrote. The sequence then
// continues bit for bit as the original would have.
// n_tokens: load only the first n tokens; requires a sequence without scores that has evicted
// nothing.
// Throws FormatError, without changing anything, if the bytes are invalid or belong to a cache of
// another shape or a sequence with another policy.
void read_sequence(KvCache& cache, int32_t sequence, int32_t length, ByteReader& reader,
                   std::optional<int32_t> n_tokens = std::nullopt);

}  // namespace h2o
