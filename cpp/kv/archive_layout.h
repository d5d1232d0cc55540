// Where the pages of an archive lie in the memory of its sequences. Host and device code share this
// file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "kv/policy.h"

namespace h2o {

inline constexpr int32_t kPageTokens = 16;

// The pages of one (sequence, kv_head) in one layer. A page has its tokens in the order in which
// they were evicted; those that the cache still keeps are not in it.
struct ArchiveHead {
  std::byte* k;       // [pages, kPageTokens, head_dim] in k_dtype
  std::byte* v;       // likewise, in v_dtype
  std::byte* bounds;  // [pages, 2, head_dim] bf16: of each page's keys the mean plus half the range
                      // of each element, then the mean less half the range
  int32_t* counts;    // [pages] tokens in a page
};

// The archive of a sequence. Where attend() keeps a copy of the counts and bounds, `summaries` is
// that copy, in the back end's memory; else it is `pages`.
struct ArchiveMemory {
  std::byte* pages;
  std::byte* summaries;
};

struct ArchiveLayout {
  DType k_dtype;
  DType v_dtype;
  int32_t n_kv_heads;
  int32_t n_pages;     // of a (sequence, kv_head) in one layer
  int32_t n_recalled;  // pages that each query reads, at most all
  int64_t k_row_bytes;
  int64_t v_row_bytes;
  int64_t bounds_bytes;  // of a page
  int64_t bounds_at;     // offsets in the memory of a sequence, which begins with its counts;
  int64_t k_at;          // each array is [n_layers, n_kv_heads, pages, ...]; a copy of counts and
  int64_t v_at;          // bounds ends at k_at

  H2O_HD ArchiveHead head(std::byte* sequence, int32_t layer, int32_t kv_head) const {
    const int64_t page = (int64_t{layer} * n_kv_heads + kv_head) * n_pages;
    return {sequence + k_at + page * kPageTokens * k_row_bytes,
            sequence + v_at + page * kPageTokens * v_row_bytes,
            sequence + bounds_at + page * bounds_bytes,
            reinterpret_cast<int32_t*>(sequence) + page};
  }

  // With the counts and bounds that attend() reads.
  H2O_HD ArchiveHead head(const ArchiveMemory& memory, int32_t layer, int32_t kv_head) const {
    ArchiveHead result = head(memory.pages, layer, kv_head);
    const ArchiveHead summaries = head(memory.summaries, layer, kv_head);
    result.bounds = summaries.bounds;
    result.counts = summaries.counts;
    return result;
  }
};

}  // namespace h2o
