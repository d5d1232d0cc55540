#include "kv/archive.h"

#include <algorithm>
#include <cmath>
#include <system_error>

#include "core/error.h"
#include "core/layout.h"
#include "io/scratch_file.h"
#include "io/utf8_path.h"

namespace h2o {

int32_t default_archive_pages(int32_t max_tokens) {
  return std::clamp(static_cast<int32_t>(0.75 * std::sqrt(std::max(max_tokens, 0))), 16, 48);
}

KvArchive::KvArchive(Backend& backend, const ArchiveOptions& options, int32_t n_layers,
                     int32_t n_kv_heads, int32_t head_dim, int32_t max_tokens)
    : backend_(backend),
      options_(options),
      n_kv_heads_(n_kv_heads),
      head_dim_(head_dim),
      indices_(size_t{1} * n_layers * n_kv_heads, options.heads.empty() ? 0 : -1),
      begins_{0},
      layout_{} {
  for (const int32_t head : options.heads) indices_[head] = 0;
  for (int32_t i = 0; i < std::ssize(indices_); ++i) {
    if (indices_[i] == 0) {
      indices_[i] = static_cast<int32_t>(kv_heads_.size());
      kv_heads_.push_back(i % n_kv_heads);
    }
    if ((i + 1) % n_kv_heads == 0) begins_.push_back(static_cast<int32_t>(kv_heads_.size()));
  }
  layout_.k_dtype = options.k_dtype;
  layout_.v_dtype = options.v_dtype;
  layout_.page_tokens = has_grids() ? kGridPageTokens : kPageTokens;
  layout_.n_pages = layout_.pages_of(max_tokens);
  layout_.n_recalled = std::min(options.n_recalled, layout_.n_pages);
  layout_.k_row_bytes = byte_size(options.k_dtype, head_dim);
  layout_.v_row_bytes = byte_size(options.v_dtype, head_dim);
  layout_.bounds_bytes =
      has_grids() ? KeyGrid::bytes(head_dim) : byte_size(kBoundsType, int64_t{2} * head_dim);
  const int64_t pages = n_all_pages();
  Layout layout;
  layout.place(pages * int64_t{sizeof(int32_t)});
  layout_.bounds_at = layout.place(pages * layout_.bounds_bytes);
  layout_.k_at = layout.place(pages * layout_.page_tokens * layout_.k_row_bytes);
  layout_.v_at = layout.place(pages * layout_.page_tokens * layout_.v_row_bytes);
  sequence_bytes_ = layout.size();
}

void KvArchive::reserve_sequences(int32_t n) {
  if (!options_.directory.empty()) check_space(n - std::ssize(sequences_));
  while (std::ssize(sequences_) < n) {
    Sequence sequence;
    sequence.pages = options_.directory.empty()
                         ? backend_.allocate_host(sequence_bytes_)
                         : map_scratch_file(options_.directory, sequence_bytes_);
    if (backend_.capabilities().copied_summaries) {
      sequence.summaries = backend_.allocate(layout_.k_at);
    }
    sequence.recalls = std::make_unique<std::atomic<int64_t>[]>(n_all_pages());
    sequences_.push_back(std::move(sequence));
  }
}

// So that files that cannot all be there do not fill the disk first.
void KvArchive::check_space(int64_t n_more) const {
  std::error_code unknown;
  const uintmax_t free = std::filesystem::space(options_.directory, unknown).available;
  if (unknown || n_more <= 0 || sequence_bytes_ <= free / static_cast<uint64_t>(n_more)) return;
  throw OutOfMemory(concat("an archive of ", n_more, " x ", sequence_bytes_, " bytes is more than ",
                           free, ", the free bytes in ", utf8(options_.directory)));
}

void KvArchive::release_sequences(int32_t n) { sequences_.resize(n); }

ArchiveMemory KvArchive::memory(int32_t sequence) const {
  const auto& [pages, summaries, recalls] = sequences_[sequence];
  return {pages.data(), summaries.size() > 0 ? summaries.data() : pages.data()};
}

void KvArchive::clear(int32_t sequence) {
  backend_.finish();
  std::ranges::fill(counts(sequence), 0);
  std::fill_n(sequences_[sequence].recalls.get(), n_all_pages(), 0);
  const Buffer& summaries = sequences_[sequence].summaries;
  if (summaries.size() > 0) {
    backend_.write(summaries.data(), counts(sequence).data(), counts(sequence).size_bytes());
  }
}

std::vector<int64_t> KvArchive::recalls(int32_t sequence) const {
  std::vector<int64_t> sums(n_pages());
  for (int64_t i = 0; i < n_all_pages(); ++i) {
    sums[i % n_pages()] += sequences_[sequence].recalls[i].load(std::memory_order_relaxed);
  }
  return sums;
}

void KvArchive::update_summaries(int32_t sequence) const {
  const auto& [pages, summaries, recalls] = sequences_[sequence];
  if (summaries.size() > 0) backend_.write(summaries.data(), pages.data(), summaries.size());
}

size_t KvArchive::device_bytes() const {
  size_t bytes = 0;
  for (const Sequence& sequence : sequences_) bytes += sequence.summaries.size();
  return bytes;
}

size_t KvArchive::bytes() const {
  backend_.finish();
  int64_t bytes = 0;
  for (int32_t s = 0; s < std::ssize(sequences_); ++s) {
    for (const int32_t n : counts(s)) {
      if (n > 0) bytes += n * (k_row_bytes() + v_row_bytes()) + bounds_bytes();
    }
  }
  return static_cast<size_t>(bytes);
}

}  // namespace h2o
