// Recall: queries attend to the archived pages with the largest estimated logits, in addition to
// the tokens in the cache.
//
// Each row of a segment selects its own pages, shared by all query heads of a kv_head: those with
// the largest estimate over these heads. The selection does not depend on how pages are divided for
// the search, and pages are attended to in order. So results do not depend, bit for bit, on how
// rows are grouped into tiles or work is assigned to threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

#include "backend/backend.h"
#include "cpu/attention/tile.h"
#include "cpu/kernels.h"
#include "kv/archive.h"
#include "kv/page_estimate.h"
#include "kv/view.h"

namespace h2o {

class Workspace;

// Pages searched together: their bounds fit in the L2 cache.
constexpr int64_t kPartPages = 256;

// Pages whose KeyGrids become bounds together.
constexpr int64_t kGridPages = 16;

// Rows [first, first + n) of a segment, at most one tile, with the query heads of one kv_head.
struct TileRows {
  const Segment& segment;
  int32_t kv_head;
  int64_t first;
  int64_t n;
};

// The pages with the largest estimates among those offered since clear(), up to the capacity of the
// storage; at least one.
class BestPages {
 public:
  explicit BestPages(std::span<EstimatedPage> room) : pages_(room) {}

  void clear() const { std::fill(pages_.begin(), pages_.end(), kNone); }

  void offer(const EstimatedPage& page) const {
    if (!page.before(pages_.front())) return;  // the worst of those selected so far
    std::pop_heap(pages_.begin(), pages_.end(), before);
    pages_.back() = page;
    std::push_heap(pages_.begin(), pages_.end(), before);
  }
  void offer(const BestPages& others) const {
    for (const EstimatedPage& page : others.pages_) offer(page);
  }

  // Sorted by index. Call clear() before offering more pages.
  std::span<const EstimatedPage> in_order() const {
    std::sort(pages_.begin(), pages_.end(),
              [](const EstimatedPage& a, const EstimatedPage& b) { return a.page < b.page; });
    const auto none = [](const EstimatedPage& page) { return page.page == kNone.page; };
    return {pages_.begin(), std::find_if(pages_.begin(), pages_.end(), none)};
  }

 private:
  // Sorts after every page.
  static constexpr EstimatedPage kNone{-std::numeric_limits<float>::infinity(),
                                       std::numeric_limits<int32_t>::max()};
  static bool before(const EstimatedPage& a, const EstimatedPage& b) { return a.before(b); }

  std::span<EstimatedPage> pages_;  // a heap
};

// Workspace of Recall: per-thread buffers, buffers of tiles whose pages are searched by several
// threads, and the sums of all queries of a batch. Placed after Workspace.
class RecallSpace {
 public:
  RecallSpace(const Workspace& workspace, const KvView& shape, int n_threads);

  size_t bytes() const {
    return (n_threads_ * thread_floats() + n_tiles_ * tile_floats() +
            n_queries_ * (2 + head_dim_)) *
           sizeof(float);
  }

  // Memory of a thread.
  float* q(int thread) const {
    return base() + thread * thread_floats();
  }  // [queries, 2, head_dim]
  float* estimates(int thread) const {  // [queries, kPartPages]
    return q(thread) + 2 * tile_queries_ * head_dim_;
  }
  BestPages best(int thread, int64_t row) const {  // of a tile
    return pages_at(estimates(thread) + tile_queries_ * kPartPages, row, n_recalled_);
  }
  float* exps(int thread) const {  // [queries, kExpsStride]
    return estimates(thread) + tile_queries_ * kPartPages + tile_rows_ * n_recalled_ * kPageFloats;
  }
  TileSums part(int thread) const {  // [queries] of a block of keys
    return sums_at(exps(thread) + tile_queries_ * kExpsStride, tile_queries_, 0);
  }
  float* scaled(int thread) const {  // [queries, head_dim]
    return exps(thread) + tile_queries_ * (kExpsStride + 2 + head_dim_);
  }
  float* shifts(int thread) const {  // [queries]
    return scaled(thread) + tile_queries_ * head_dim_;
  }
  float* bounds(int thread) const {  // [kGridPages, 2, head_dim]
    return shifts(thread) + tile_queries_;
  }

  // The best pages of one part, for a row of a tile whose parts are searched by several threads.
  BestPages best(int64_t tile, int64_t row, int64_t part) const {
    return pages_at(base() + n_threads_ * thread_floats() + tile * tile_floats(),
                    row * n_parts_ + part, std::min(n_recalled_, kPartPages));
  }

  // Starting at a query of the batch: [n_kv_heads, max_rows, group]
  TileSums sums(int64_t query) const {
    return sums_at(base() + n_threads_ * thread_floats() + n_tiles_ * tile_floats(), n_queries_,
                   query);
  }

 private:
  static constexpr int64_t kPageFloats = sizeof(EstimatedPage) / sizeof(float);

  float* base() const { return reinterpret_cast<float*>(workspace_ + begin_); }
  int64_t thread_floats() const;
  int64_t tile_floats() const;
  static BestPages pages_at(float* at, int64_t i, int64_t n) {
    return BestPages({reinterpret_cast<EstimatedPage*>(at) + i * n, static_cast<size_t>(n)});
  }
  TileSums sums_at(float* at, int64_t n, int64_t query) const {
    return {{at + query, at + n + query}, at + 2 * n + query * head_dim_};
  }

  std::byte* workspace_;
  size_t begin_;  // offset in bytes
  int64_t n_threads_;
  int64_t n_tiles_;
  int64_t group_;
  int64_t tile_rows_;
  int64_t tile_queries_;
  int64_t head_dim_;
  int64_t n_parts_;  // that all pages are divided into
  int64_t n_recalled_;
  int64_t n_queries_;  // of a batch
};

class Recall {
 public:
  Recall(const CpuKernels& kernels, const Attention& attention, const KvView& cache,
         const Workspace& workspace, int n_threads)
      : kernels_(kernels),
        attention_(attention),
        cache_(cache),
        space_(workspace, cache, n_threads),
        group_(cache.n_heads / cache.n_kv_heads) {}

  // Does the segment have archived tokens? Tokens outside a window are not archived.
  bool wanted(const Segment& segment) const {
    return attention_.window == 0 &&
           cache_.policies[segment.sequence].kept(segment.position) < segment.position;
  }
  bool wanted(const Segment& segment, int32_t kv_head) const {
    return cache_.archive_heads[kv_head] >= 0 && wanted(segment);
  }

  // Number of parts that a segment's pages can be searched in.
  int64_t n_parts(const Segment& segment) const {
    return (n_pages(segment) + kPartPages - 1) / kPartPages;
  }

  // Searches all pages on one thread, and attends to the best.
  void attend(const TileRows& rows, int thread) const;

  // Does it in two steps: parts of the pages are searched by any threads first. `tile`: index of
  // the tile in the batch.
  void search(const TileRows& rows, int64_t tile, int64_t part, int thread) const;
  void attend_found(const TileRows& rows, int64_t tile, int thread) const;

  // The resulting sums, in the order of a tile's queries.
  TileSums sums(const Segment& segment, int32_t kv_head, int64_t first) const {
    return space_.sums((int64_t{kv_head} * cache_.max_rows + segment.row + first) * group_);
  }

 private:
  struct Queries {
    const float* data;  // [n, head_dim]
    int64_t n;
  };

  // Is every page recalled? Then all rows of a tile attend to the same pages, together.
  bool recalls_all(const Segment& segment) const {
    return n_pages(segment) <= cache_.archive->layout().n_recalled;
  }
  TileRows choosing_rows(const TileRows& rows) const {
    return {rows.segment, rows.kv_head, rows.first, recalls_all(rows.segment) ? 1 : rows.n};
  }

  int64_t n_pages(const Segment& segment) const {
    return cache_.archive->layout().pages_of(segment.position);
  }
  const float* queries(const TileRows& rows, int64_t row) const {  // [group, head_dim]
    return attention_.q.floats() + (rows.segment.row + rows.first + row) * attention_.q.cols +
           rows.kv_head * group_ * cache_.head_dim;
  }
  template <class Best>
  void offer_part(const TileRows& rows, int64_t part, int thread, const Best& best) const;
  void estimate(const TileRows& rows, const ArchiveHead& head, int64_t begin, int64_t n,
                int thread) const;
  void attend_pages(const TileRows& rows, int64_t row, int64_t n_rows,
                    std::span<const EstimatedPage> pages, int thread) const;
  void attend_block(const ArchiveHead& head, std::span<const EstimatedPage> pages, const Queries& q,
                    int thread, const TileSums& to) const;
  void multiply_keys(const ArchiveHead& head, int32_t page, const Queries& q, float* logits,
                     int thread) const;

  const CpuKernels& kernels_;
  const Attention& attention_;
  const KvView& cache_;
  const RecallSpace space_;
  const int64_t group_;  // query heads per kv_head
};

}  // namespace h2o
