// The archive of a sequence as bytes: what a snapshot holds of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/bytes.h"
#include "kv/archive.h"

namespace h2o {

// How an archive stores and recalls tokens; check_archive_options() throws FormatError for others.
void write_archive_options(const KvArchive& archive, ByteWriter& writer);
void check_archive_options(const KvArchive& archive, ByteReader& reader);

// The pages of one kv_head, of a sequence of `length` tokens.
void write_archive(const KvArchive& archive, const ArchiveHead& head, int32_t length,
                   ByteWriter& writer);

struct ArchiveImage {
  std::vector<int32_t> counts;
  std::span<const std::byte> rows;  // of each page that has any: bounds, keys, values
};

// Throws FormatError where a page has more tokens than the text has at its positions, besides
// those that the cache keeps, at `positions`.
ArchiveImage read_archive(const KvArchive& archive, int32_t length,
                          std::span<const int32_t> positions, ByteReader& reader);

// Into an archive of a sequence that is empty.
void restore_archive(const KvArchive& archive, const ArchiveHead& head, const ArchiveImage& image);

}  // namespace h2o
