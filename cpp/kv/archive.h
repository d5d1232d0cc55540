// KvArchive: what a bounded cache evicts, kept in the host's memory or in files, for queries to
// recall.
//
// Pages hold the tokens of kPageTokens consecutive positions. By the largest and smallest elements
// of a page's keys (Quest, arXiv 2406.10774) a query estimates its largest q.k, and finds the pages
// that matter without reading their keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "backend/backend.h"
#include "core/dtype.h"

namespace h2o {

inline constexpr int32_t kPageTokens = 16;

// How many pages a query recalls where nothing else is asked for.
inline constexpr int32_t kArchivePages = 16;

struct ArchiveOptions {
  int32_t n_recalled = 0;       // pages that each query reads; 0: there is no archive
  DType k_dtype = DType::q8_0;  // as those of the cache, in types of kv_dtypes()
  DType v_dtype = DType::q8_0;
  std::filesystem::path directory =
      {};  // it is in files there, which end with it; empty: in memory

  bool operator==(const ArchiveOptions&) const = default;
};

// The pages of one (sequence, kv_head) in one layer. A page has its tokens in the order in which
// they were evicted; those that the cache still keeps are not in it.
struct ArchiveHead {
  std::byte* k;       // [pages, kPageTokens, head_dim] in k_dtype
  std::byte* v;       // likewise, in v_dtype
  std::byte* bounds;  // [pages, 2, head_dim] bf16: of each page's keys the maxima, then the minima
  int32_t* counts;    // [pages] tokens in a page
};

class KvArchive {
 public:
  static constexpr DType kBoundsType = DType::bf16;

  // For sequences of up to `max_tokens` tokens. Allocates nothing.
  KvArchive(Backend& backend, const ArchiveOptions& options, int32_t n_layers, int32_t n_kv_heads,
            int32_t head_dim, int32_t max_tokens);

  // Makes room for `n` sequences, whose pages take memory when they are first written. Throws
  // OutOfMemory, FileError.
  void reserve_sequences(int32_t n);

  ArchiveHead head(int32_t layer, int32_t sequence, int32_t kv_head) const;

  // Forgets what a sequence has.
  void clear(int32_t sequence);

  const ArchiveOptions& options() const { return options_; }
  int32_t n_pages() const { return n_pages_; }  // of a sequence
  int64_t k_row_bytes() const { return k_row_bytes_; }
  int64_t v_row_bytes() const { return v_row_bytes_; }
  int64_t bounds_bytes() const { return bounds_bytes_; }  // of a page

  // Bytes of the tokens that are archived, of all sequences, and of their pages' bounds.
  size_t bytes() const;

 private:
  int32_t n_heads() const { return n_layers_ * n_kv_heads_; }
  int32_t* counts(int32_t sequence) const { return sequences_[sequence].as<int32_t>(); }

  Backend& backend_;
  ArchiveOptions options_;
  int32_t n_layers_;
  int32_t n_kv_heads_;
  int32_t n_pages_;
  int64_t k_row_bytes_;
  int64_t v_row_bytes_;
  int64_t bounds_bytes_;
  int64_t bounds_at_ = 0;  // offsets in the memory of a sequence, which begins with its counts;
  int64_t k_at_ = 0;       // each array is [n_layers, n_kv_heads, pages, ...]
  int64_t v_at_ = 0;
  size_t sequence_bytes_ = 0;
  std::vector<Buffer> sequences_;
};

}  // namespace h2o
