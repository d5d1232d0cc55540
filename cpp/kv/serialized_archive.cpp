#include "kv/serialized_archive.h"

#include <algorithm>

namespace h2o {
namespace {

// Calls visit(first byte, number of bytes) for each stored array of a page of n tokens.
template <class Visit>
void visit_page(const KvArchive& archive, const ArchiveHead& head, int64_t page, int64_t n,
                const Visit& visit) {
  if (n == 0) return;
  visit(head.bounds + page * archive.bounds_bytes(), archive.bounds_bytes());
  visit(archive.keys(head, page), n * archive.k_row_bytes());
  visit(archive.values(head, page), n * archive.v_row_bytes());
}

}  // namespace

void write_archive_options(const KvArchive& archive, ByteWriter& writer) {
  writer.put(archive.options().n_recalled);
  writer.put(archive.options().k_dtype);
  writer.put(archive.options().v_dtype);
  if (!archive.archives_all()) writer.put(archive.indices());
}

void check_archive_options(const KvArchive& archive, ByteReader& reader) {
  const auto n_recalled = reader.get<int32_t>();
  const auto k_dtype = reader.get<DType>();
  const auto v_dtype = reader.get<DType>();
  const bool same_heads =
      archive.archives_all() ||
      std::ranges::equal(reader.get<int32_t>(archive.indices().size()), archive.indices());
  const ArchiveOptions& options = archive.options();
  if (n_recalled != options.n_recalled || k_dtype != options.k_dtype ||
      v_dtype != options.v_dtype || !same_heads) {
    throw FormatError(
        concat(reader.what(),
               " has an archive of other types, heads or number of recalled pages; use "
               "the archive options that it was saved with"));
  }
}

void write_archive(const KvArchive& archive, const ArchiveHead& head, int32_t length,
                   ByteWriter& writer) {
  const std::span<const int32_t> counts(head.counts, archive.layout().pages_of(length));
  writer.put(counts);
  for (int64_t page = 0; page < std::ssize(counts); ++page) {
    visit_page(archive, head, page, counts[page],
               [&](const std::byte* from, int64_t n) { std::copy_n(from, n, writer.extend(n)); });
  }
}

ArchiveImage read_archive(const KvArchive& archive, int32_t length,
                          std::span<const int32_t> positions, ByteReader& reader) {
  ArchiveImage image{reader.get<int32_t>(archive.layout().pages_of(length)), {}};
  std::vector<int32_t> evicted(image.counts.size(), archive.page_tokens());
  if (!evicted.empty()) evicted.back() = (length - 1) % archive.page_tokens() + 1;
  for (const int32_t position : positions) --evicted[position / archive.page_tokens()];
  const bool empty = std::ranges::all_of(image.counts, [](int32_t n) { return n == 0; });
  int64_t bytes = 0;
  for (size_t page = 0; page < evicted.size(); ++page) {
    const int64_t n = image.counts[page];
    if (n != evicted[page] && !empty) {
      throw FormatError(concat(reader.what(), " is invalid: page ", page, " of its archive has ", n,
                               " tokens, ", evicted[page], " were evicted"));
    }
    const int64_t row = archive.k_row_bytes() + archive.v_row_bytes();
    if (n > 0) bytes += archive.bounds_bytes() + n * row;
  }
  image.rows = reader.take(bytes);
  return image;
}

void restore_archive(const KvArchive& archive, const ArchiveHead& head, const ArchiveImage& image) {
  std::copy(image.counts.begin(), image.counts.end(), head.counts);
  const std::byte* from = image.rows.data();
  for (int64_t page = 0; page < std::ssize(image.counts); ++page) {
    visit_page(archive, head, page, image.counts[page], [&](std::byte* to, int64_t n) {
      std::copy_n(from, n, to);
      from += n;
    });
  }
}

}  // namespace h2o
