// Serialization of a sequence's archive, for snapshots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/bytes.h"
#include "kv/archive.h"

namespace h2o {

// The options that determine how tokens are stored and recalled, whether in memory or in files;
// check_archive_options() throws FormatError if they differ.
void write_archive_options(const KvArchive& archive, ByteWriter& writer);
void check_archive_options(const KvArchive& archive, ByteReader& reader);

// The pages of one kv_head, of a sequence of `length` tokens.
void write_archive(const KvArchive& archive, const ArchiveHead& head, int32_t length,
                   ByteWriter& writer);

struct ArchiveImage {
  std::vector<int32_t> counts;
  std::span<const std::byte> rows;  // of each non-empty page: bounds, keys, values
};

// Reads an archive. Throws FormatError unless its pages have all tokens but those at `positions`,
// which the cache keeps, or none, as in a layer with a window.
ArchiveImage read_archive(const KvArchive& archive, int32_t length,
                          std::span<const int32_t> positions, ByteReader& reader);

// Restores into an empty archive.
void restore_archive(const KvArchive& archive, const ArchiveHead& head, const ArchiveImage& image);

}  // namespace h2o
