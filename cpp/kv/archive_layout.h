// The memory layout of archived pages. Shared by host and device code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "kv/key_grid.h"
#include "kv/policy.h"

namespace h2o {

inline constexpr int32_t kPageTokens = 16;

// Tokens of pages with keys in q3: more keys share a KeyGrid.
inline constexpr int32_t kGridPageTokens = 32;

// The pages of one (sequence, kv_head) in one layer. A page holds its evicted tokens in order of
// eviction; tokens still in the cache are not in it.
struct ArchiveHead {
  std::byte* k;       // [pages, page_tokens, head_dim] in k_dtype
  std::byte* v;       // likewise, in v_dtype
  std::byte* bounds;  // [pages, 2, head_dim] bf16: per element of a page's keys, mean + range / 2,
                      // then mean - range / 2; keys in q3: [pages] KeyGrid
  int32_t* counts;    // [pages] tokens per page
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
  int32_t n_pages;  // per sequence and head
  int32_t page_tokens;
  int32_t n_recalled;  // pages that each query reads, at most n_pages
  int64_t k_row_bytes;
  int64_t v_row_bytes;
  int64_t bounds_bytes;  // per page
  int64_t bounds_at;     // offsets in a sequence's memory, which begins with its counts;
  int64_t k_at;          // each array is [archived heads, pages, ...]; a copy of counts and bounds
  int64_t v_at;          // ends at k_at

  H2O_HD bool has_grids() const { return k_dtype == DType::q3; }
  H2O_HD KeyGrid grid(const ArchiveHead& head, int64_t page, int64_t head_dim) const {
    return {head.bounds + page * bounds_bytes, head_dim};
  }

  int32_t pages_of(int32_t n_tokens) const {
    return n_tokens / page_tokens + (n_tokens % page_tokens > 0);
  }

  // `index`: among the archived heads of all layers
  H2O_HD ArchiveHead head(std::byte* sequence, int32_t index) const {
    const int64_t page = int64_t{index} * n_pages;
    return {sequence + k_at + page * page_tokens * k_row_bytes,
            sequence + v_at + page * page_tokens * v_row_bytes,
            sequence + bounds_at + page * bounds_bytes,
            reinterpret_cast<int32_t*>(sequence) + page};
  }

  // A head with the counts and bounds that attend() reads.
  H2O_HD ArchiveHead head(const ArchiveMemory& memory, int32_t index) const {
    ArchiveHead result = head(memory.pages, index);
    const ArchiveHead summaries = head(memory.summaries, index);
    result.bounds = summaries.bounds;
    result.counts = summaries.counts;
    return result;
  }
};

}  // namespace h2o
