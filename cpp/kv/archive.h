// KvArchive: the tokens that a bounded cache evicted, in host memory or files, for queries to
// recall.
//
// A page holds the tokens of 16 consecutive positions, or 32 with keys in q3. From the mean and
// range of each element of a page's keys (the range as in Quest, arXiv 2406.10774), a query
// estimates the page's largest q.k without reading its keys, and recalls the pages with the largest
// estimates.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "core/dtype.h"
#include "kv/archive_layout.h"

namespace h2o {

// Default number of pages that a query recalls, for sequences of up to `max_tokens`. Grows with the
// square root of the length, since more pages matter in longer sequences, up to where a token would
// become much more expensive.
int32_t default_archive_pages(int32_t max_tokens);

struct ArchiveOptions {
  int32_t n_recalled = 0;       // pages that each query reads; 0: no archive
  DType k_dtype = DType::q8_0;  // one of kv_dtypes(), or q3
  DType v_dtype = DType::q8_0;  // one of kv_dtypes(), or q2
  // it is in files there, which end with it; empty: in memory
  std::filesystem::path directory = {};
  // the archived heads, layer * n_kv_heads + kv_head, each once; what others evict is lost. Empty:
  // all
  std::vector<int32_t> heads = {};
};

class KvArchive {
 public:
  static constexpr DType kBoundsType = DType::bf16;

  // An archive for sequences of up to `max_tokens` tokens. Does not allocate yet.
  KvArchive(Backend& backend, const ArchiveOptions& options, int32_t n_layers, int32_t n_kv_heads,
            int32_t head_dim, int32_t max_tokens);

  // Grows to `n` sequences. Memory is committed when a page is first written, or at once if it is
  // pinned. Throws OutOfMemory, FileError.
  void reserve_sequences(int32_t n);
  // Shrinks to the first `n`, whose content stays.
  void release_sequences(int32_t n);
  int32_t n_sequences() const { return static_cast<int32_t>(sequences_.size()); }

  // The archived kv_heads of a layer, ascending.
  std::span<const int32_t> kv_heads(int32_t layer) const {
    return {kv_heads_.data() + begins_[layer], kv_heads_.data() + begins_[layer + 1]};
  }

  // ArchiveLayout::head() of every head in all layers; -1: not archived.
  std::span<const int32_t> indices() const { return indices_; }
  int64_t n_heads() const { return std::ssize(kv_heads_); }  // archived ones, in all layers
  bool archives_all() const { return kv_heads_.size() == indices_.size(); }
  bool archives(int32_t layer, int32_t kv_head) const { return index(layer, kv_head) >= 0; }

  // View of an archived head. The host may access it only while no pass is running: see
  // Backend::finish().
  ArchiveHead head(int32_t layer, int32_t sequence, int32_t kv_head) const {
    return layout_.head(this->sequence(sequence), index(layer, kv_head));
  }
  std::byte* sequence(int32_t sequence) const { return sequences_[sequence].pages.data(); }
  ArchiveMemory memory(int32_t sequence) const;

  // A page's keys [page_tokens, head_dim], its values, and, if has_grids(), what the keys'
  // codes mean.
  std::byte* keys(const ArchiveHead& head, int64_t page) const {
    return head.k + page * page_tokens() * k_row_bytes();
  }
  std::byte* values(const ArchiveHead& head, int64_t page) const {
    return head.v + page * page_tokens() * v_row_bytes();
  }
  KeyGrid grid(const ArchiveHead& head, int64_t page) const {
    return layout_.grid(head, page, head_dim_);
  }
  bool has_grids() const { return layout_.has_grids(); }

  // Counts n tokens that recall a page, by any thread. Only the host does; for a device, counts
  // stay 0. They are not a part of the cache's content.
  void count_recalls(int32_t layer, int32_t sequence, int32_t kv_head, int32_t page,
                     int64_t n) const {
    const int64_t i = int64_t{index(layer, kv_head)} * n_pages() + page;
    sequences_[sequence].recalls[i].fetch_add(n, std::memory_order_relaxed);
  }
  // [n_pages]: the tokens that have recalled each page since the sequence was cleared, summed over
  // the archived heads.
  std::vector<int64_t> recalls(int32_t sequence) const;

  // Removes a sequence's tokens.
  void clear(int32_t sequence);

  // The host has written pages of a sequence: attend() is to read their counts and bounds.
  void update_summaries(int32_t sequence) const;

  const ArchiveOptions& options() const { return options_; }
  const ArchiveLayout& layout() const { return layout_; }
  int32_t n_pages() const { return layout_.n_pages; }  // per sequence
  int32_t page_tokens() const { return layout_.page_tokens; }
  int64_t k_row_bytes() const { return layout_.k_row_bytes; }
  int64_t v_row_bytes() const { return layout_.v_row_bytes; }
  int64_t bounds_bytes() const { return layout_.bounds_bytes; }  // per page

  // Bytes of archived tokens in all sequences and their pages' bounds.
  size_t bytes() const;

  // Bytes of the back end's memory: of the copies of counts and bounds.
  size_t device_bytes() const;

 private:
  struct Sequence {
    Buffer pages;
    Buffer summaries;                                      // empty unless the back end copies them
    std::unique_ptr<std::atomic<int64_t>[]> recalls = {};  // [archived heads, pages]
  };

  int32_t index(int32_t layer, int32_t kv_head) const {
    return indices_[layer * n_kv_heads_ + kv_head];
  }

  int64_t n_all_pages() const { return n_heads() * n_pages(); }  // of a sequence

  // Throws OutOfMemory unless the disk has room for the files of so many sequences.
  void check_space(int64_t n_more) const;

  // Counts of all archived heads of a sequence.
  std::span<int32_t> counts(int32_t sequence) const {
    return {sequences_[sequence].pages.as<int32_t>(), static_cast<size_t>(n_all_pages())};
  }

  Backend& backend_;
  ArchiveOptions options_;
  int32_t n_kv_heads_;  // per layer
  int32_t head_dim_;
  std::vector<int32_t> indices_;   // [n_layers, n_kv_heads]
  std::vector<int32_t> kv_heads_;  // archived, by layer
  std::vector<int32_t> begins_;    // [n_layers + 1] in kv_heads_
  ArchiveLayout layout_;
  size_t sequence_bytes_ = 0;
  std::vector<Sequence> sequences_;
};

}  // namespace h2o
