#include "cpu/attention/recall.h"

#include <algorithm>

#include "cpu/attention/workspace.h"

namespace h2o {
namespace {

constexpr int64_t kBlockPages = kKeyBlock / kPageTokens;  // attended to together

}  // namespace

RecallSpace::RecallSpace(const KvView& shape, int n_threads)
    : workspace_(shape.workspace),
      begin_(Workspace(shape, n_threads).bytes()),
      n_threads_(n_threads),
      n_tiles_(Workspace(shape, n_threads).n_tiles()),
      group_(shape.n_heads / shape.n_kv_heads),
      tile_rows_(Tile::rows(group_)),
      tile_queries_(tile_rows_ * group_),
      head_dim_(shape.head_dim),
      n_parts_((shape.archive->n_pages() + kPartPages - 1) / kPartPages),
      n_recalled_(shape.archive->layout().n_recalled),
      n_queries_(int64_t{shape.n_heads} * shape.max_rows) {}

int64_t RecallSpace::thread_floats() const {
  return whole_cache_lines(tile_queries_ * (2 * head_dim_ + kPartPages) +
                           tile_rows_ * n_recalled_ * kPageFloats +
                           group_ * (kKeyBlock + 2 + head_dim_));
}

int64_t RecallSpace::tile_floats() const {
  return whole_cache_lines(tile_rows_ * n_parts_ * std::min(n_recalled_, kPartPages) * kPageFloats);
}

void Recall::attend(const TileRows& rows, int thread) const {
  const auto best = [&](int64_t row) { return space_.best(thread, row); };
  for (int64_t row = 0; row < rows.n; ++row) best(row).clear();
  for (int64_t part = 0; part < n_parts(rows.segment); ++part) offer_part(rows, part, thread, best);
  for (int64_t row = 0; row < rows.n; ++row) {
    attend_pages(rows, row, best(row).in_order(), thread);
  }
}

void Recall::search(const TileRows& rows, int64_t tile, int64_t part, int thread) const {
  const auto best = [&](int64_t row) { return space_.best(tile, row, part); };
  for (int64_t row = 0; row < rows.n; ++row) best(row).clear();
  offer_part(rows, part, thread, best);
}

void Recall::attend_found(const TileRows& rows, int64_t tile, int thread) const {
  const BestPages best = space_.best(thread, 0);
  for (int64_t row = 0; row < rows.n; ++row) {
    best.clear();
    for (int64_t part = 0; part < n_parts(rows.segment); ++part) {
      best.offer(space_.best(tile, row, part));
    }
    attend_pages(rows, row, best.in_order(), thread);
  }
}

// Offers the pages of a part to best(row) for each row.
template <class Best>
void Recall::offer_part(const TileRows& rows, int64_t part, int thread, const Best& best) const {
  const KvArchive& archive = *cache_.archive;
  const ArchiveHead head = archive.head(cache_.layer, rows.segment.sequence, rows.kv_head);
  const int64_t head_dim = cache_.head_dim;
  const int64_t begin = part * kPartPages;
  const int64_t n = std::min(kPartPages, n_pages(rows.segment) - begin);

  float* to = space_.q(thread);
  for (int64_t row = 0; row < rows.n; ++row) {
    const float* from = queries(rows, row);
    for (int64_t i = 0; i < group_; ++i, from += head_dim, to += 2 * head_dim) {
      for (int64_t d = 0; d < head_dim; ++d) {
        to[d] = weight_of_upper(from[d]);
        to[head_dim + d] = weight_of_lower(from[d]);
      }
    }
  }
  const float* estimates = space_.estimates(thread);
  kernels_.of(KvArchive::kBoundsType)
      .matmul({.y = space_.estimates(thread),
               .x = space_.q(thread),
               .w = head.bounds + begin * archive.bounds_bytes(),
               .bias = nullptr,
               .n_rows = rows.n * group_,
               .n_in = 2 * head_dim,
               .w_row_bytes = archive.bounds_bytes(),
               .y_stride = kPartPages,
               .add = false},
              0, n);

  for (int64_t row = 0; row < rows.n; ++row, estimates += group_ * kPartPages) {
    const BestPages to_row = best(row);
    for (int64_t page = 0; page < n; ++page) {
      if (head.counts[begin + page] == 0) continue;
      float estimate = kMinEstimate;
      for (int64_t i = 0; i < group_; ++i) {
        estimate = larger_estimate(estimate, estimates[i * kPartPages + page]);
      }
      to_row.offer({estimate, static_cast<int32_t>(begin + page)});
    }
  }
}

// Requires at least one page.
void Recall::attend_pages(const TileRows& rows, int64_t row, std::span<const EstimatedPage> pages,
                          int thread) const {
  const ArchiveHead head = cache_.archive->head(cache_.layer, rows.segment.sequence, rows.kv_head);
  const TileSums to = sums(rows.segment, rows.kv_head, rows.first + row);
  for (size_t begin = 0; begin < pages.size(); begin += kBlockPages) {
    const TileSums part = begin == 0 ? to : space_.part(thread);
    attend_block(head, pages.subspan(begin, std::min<size_t>(kBlockPages, pages.size() - begin)),
                 queries(rows, row), space_.exps(thread), part);
    if (begin > 0) merge_sums(kernels_, attention_, cache_.head_dim, part, to, 0, group_);
  }
}

// For the query heads of one row, q [group, head_dim].
void Recall::attend_block(const ArchiveHead& head, std::span<const EstimatedPage> pages,
                          const float* q, float* exps, const TileSums& to) const {
  const KvArchive& archive = *cache_.archive;
  const int64_t head_dim = cache_.head_dim;
  const auto k_matmul = kernels_.of(archive.options().k_dtype).matmul;
  int64_t n_keys = 0;
  for (const EstimatedPage& page : pages) {
    k_matmul({.y = exps + n_keys,
              .x = q,
              .w = head.k + page.page * kPageTokens * archive.k_row_bytes(),
              .bias = nullptr,
              .n_rows = group_,
              .n_in = head_dim,
              .w_row_bytes = archive.k_row_bytes(),
              .y_stride = kKeyBlock,
              .add = false},
             0, head.counts[page.page]);
    n_keys += head.counts[page.page];
  }
  for (int64_t i = 0; i < group_; ++i) {
    float* const logits = exps + i * kKeyBlock;
    if (attention_.softcap > 0) {  // logits are scaled later
      kernels_.softcap(logits, n_keys, attention_.softcap / attention_.scale);
    }
    to.softmax.total[i] =
        kernels_.exponentiate(logits, n_keys, attention_.scale, to.softmax.largest + i);
  }
  std::fill_n(to.out, group_ * head_dim, 0.0f);
  const auto add_rows = kernels_.of(archive.options().v_dtype).add_rows;
  n_keys = 0;
  for (const EstimatedPage& page : pages) {
    const int64_t n = head.counts[page.page];
    add_rows({.y = to.out,
              .p = exps + n_keys,
              .rows = head.v + page.page * kPageTokens * archive.v_row_bytes(),
              .n_out = group_,
              .n_rows = n,
              .n = head_dim,
              .row_bytes = archive.v_row_bytes(),
              .p_stride = kKeyBlock});
    n_keys += n;
  }
}

}  // namespace h2o
