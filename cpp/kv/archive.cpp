#include "kv/archive.h"

#include <algorithm>

#include "core/layout.h"
#include "io/scratch_file.h"

namespace h2o {

KvArchive::KvArchive(Backend& backend, const ArchiveOptions& options, int32_t n_layers,
                     int32_t n_kv_heads, int32_t head_dim, int32_t max_tokens)
    : backend_(backend),
      options_(options),
      n_layers_(n_layers),
      n_kv_heads_(n_kv_heads),
      n_pages_((max_tokens - 1) / kPageTokens + 1),
      k_row_bytes_(byte_size(options.k_dtype, head_dim)),
      v_row_bytes_(byte_size(options.v_dtype, head_dim)),
      bounds_bytes_(byte_size(kBoundsType, int64_t{2} * head_dim)) {
  const int64_t pages = int64_t{n_heads()} * n_pages_;
  Layout layout;
  layout.place(pages * int64_t{sizeof(int32_t)});
  bounds_at_ = layout.place(pages * bounds_bytes_);
  k_at_ = layout.place(pages * kPageTokens * k_row_bytes_);
  v_at_ = layout.place(pages * kPageTokens * v_row_bytes_);
  sequence_bytes_ = layout.size();
}

void KvArchive::reserve_sequences(int32_t n) {
  while (std::ssize(sequences_) < n) {
    sequences_.push_back(options_.directory.empty()
                             ? backend_.allocate_host(sequence_bytes_)
                             : map_scratch_file(options_.directory, sequence_bytes_));
  }
}

ArchiveHead KvArchive::head(int32_t layer, int32_t sequence, int32_t kv_head) const {
  std::byte* const base = sequences_[sequence].data();
  const int64_t page = (int64_t{layer} * n_kv_heads_ + kv_head) * n_pages_;
  return {base + k_at_ + page * kPageTokens * k_row_bytes_,
          base + v_at_ + page * kPageTokens * v_row_bytes_,
          base + bounds_at_ + page * bounds_bytes_, counts(sequence) + page};
}

void KvArchive::clear(int32_t sequence) {
  std::fill_n(counts(sequence), int64_t{n_heads()} * n_pages_, 0);
}

size_t KvArchive::bytes() const {
  int64_t bytes = 0;
  for (int32_t s = 0; s < std::ssize(sequences_); ++s) {
    for (int64_t page = 0; page < int64_t{n_heads()} * n_pages_; ++page) {
      const int32_t n = counts(s)[page];
      if (n > 0) bytes += n * (k_row_bytes_ + v_row_bytes_) + bounds_bytes_;
    }
  }
  return static_cast<size_t>(bytes);
}

}  // namespace h2o
