#include "cpu/attention/recall.h"

#include <algorithm>

#include "cpu/attention/workspace.h"

namespace h2o {

RecallSpace::RecallSpace(const Workspace& workspace, const KvView& shape, int n_threads)
    : workspace_(shape.workspace),
      begin_(workspace.bytes()),
      n_threads_(n_threads),
      n_tiles_(workspace.n_tiles()),
      group_(shape.n_heads / shape.n_kv_heads),
      tile_rows_(workspace.tile_rows()),
      tile_queries_(tile_rows_ * group_),
      head_dim_(shape.head_dim),
      n_parts_((shape.archive->n_pages() + kPartPages - 1) / kPartPages),
      n_recalled_(shape.archive->layout().n_recalled),
      n_queries_(int64_t{shape.n_heads} * shape.max_rows) {}

int64_t RecallSpace::thread_floats() const {
  return whole_cache_lines(tile_queries_ * (2 * head_dim_ + kPartPages) +
                           tile_rows_ * n_recalled_ * kPageFloats +
                           tile_queries_ * (kExpsStride + 2 + head_dim_) +
                           tile_queries_ * (head_dim_ + 1) + kGridPages * 2 * head_dim_);
}

int64_t RecallSpace::tile_floats() const {
  return whole_cache_lines(tile_rows_ * n_parts_ * std::min(n_recalled_, kPartPages) * kPageFloats);
}

void Recall::attend(const TileRows& rows, int thread) const {
  const TileRows choosing = choosing_rows(rows);
  const auto best = [&](int64_t row) { return space_.best(thread, row); };
  for (int64_t row = 0; row < choosing.n; ++row) best(row).clear();
  for (int64_t part = 0; part < n_parts(rows.segment); ++part) {
    offer_part(choosing, part, thread, best);
  }
  for (int64_t row = 0; row < choosing.n; ++row) {
    attend_pages(rows, row, rows.n / choosing.n, best(row).in_order(), thread);
  }
}

void Recall::search(const TileRows& rows, int64_t tile, int64_t part, int thread) const {
  const TileRows choosing = choosing_rows(rows);
  const auto best = [&](int64_t row) { return space_.best(tile, row, part); };
  for (int64_t row = 0; row < choosing.n; ++row) best(row).clear();
  offer_part(choosing, part, thread, best);
}

void Recall::attend_found(const TileRows& rows, int64_t tile, int thread) const {
  const TileRows choosing = choosing_rows(rows);
  const BestPages best = space_.best(thread, 0);
  for (int64_t row = 0; row < choosing.n; ++row) {
    best.clear();
    for (int64_t part = 0; part < n_parts(rows.segment); ++part) {
      best.offer(space_.best(tile, row, part));
    }
    attend_pages(rows, row, rows.n / choosing.n, best.in_order(), thread);
  }
}

// Offers the pages of a part to best(row) for each row.
template <class Best>
void Recall::offer_part(const TileRows& rows, int64_t part, int thread, const Best& best) const {
  const KvArchive& archive = *cache_.archive;
  const ArchiveHead head = archive.head(cache_.layer, rows.segment.sequence, rows.kv_head);
  const int64_t begin = part * kPartPages;
  const int64_t n = std::min(kPartPages, n_pages(rows.segment) - begin);
  const bool all = recalls_all(rows.segment);
  if (!all) estimate(rows, head, begin, n, thread);

  const float* estimates = space_.estimates(thread);
  for (int64_t row = 0; row < rows.n; ++row, estimates += group_ * kPartPages) {
    const BestPages to_row = best(row);
    for (int64_t page = 0; page < n; ++page) {
      if (head.counts[begin + page] == 0) continue;
      float estimate = kMinEstimate;
      for (int64_t i = 0; i < group_ && !all; ++i) {
        estimate = larger_estimate(estimate, estimates[i * kPartPages + page]);
      }
      to_row.offer({estimate, static_cast<int32_t>(begin + page)});
    }
  }
}

// Estimates n pages for all queries.
void Recall::estimate(const TileRows& rows, const ArchiveHead& head, int64_t begin, int64_t n,
                      int thread) const {
  const KvArchive& archive = *cache_.archive;
  const int64_t head_dim = cache_.head_dim;
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
  Matmul product{.y = space_.estimates(thread),
                 .x = space_.q(thread),
                 .w = head.bounds + begin * archive.bounds_bytes(),
                 .bias = nullptr,
                 .n_rows = rows.n * group_,
                 .n_in = 2 * head_dim,
                 .w_row_bytes = archive.bounds_bytes(),
                 .y_stride = kPartPages,
                 .add = false};
  if (!archive.has_grids()) {
    kernels_.of(KvArchive::kBoundsType).matmul(product, 0, n);
    return;
  }
  float* const bounds = space_.bounds(thread);
  product.w = reinterpret_cast<const std::byte*>(bounds);
  product.w_row_bytes = 2 * head_dim * int64_t{sizeof(float)};
  for (int64_t done = 0; done < n; done += kGridPages, product.y += kGridPages) {
    const int64_t n_grids = std::min(kGridPages, n - done);
    for (int64_t i = 0; i < n_grids; ++i) {
      archive.grid(head, begin + done + i).bounds(bounds + 2 * head_dim * i);
    }
    kernels_.f32.matmul(product, 0, n_grids);
  }
}

// Attends for rows [row, row + n_rows) of a tile.
void Recall::attend_pages(const TileRows& rows, int64_t row, int64_t n_rows,
                          std::span<const EstimatedPage> pages, int thread) const {
  const ArchiveHead head = cache_.archive->head(cache_.layer, rows.segment.sequence, rows.kv_head);
  const TileSums to = sums(rows.segment, rows.kv_head, rows.first + row);
  Queries q{queries(rows, row), n_rows * group_};
  for (const EstimatedPage& page : pages) {
    cache_.archive->count_recalls(cache_.layer, rows.segment.sequence, rows.kv_head, page.page,
                                  n_rows);
  }
  if (pages.empty()) {  // of a snapshot whose archive has no tokens: sums of no keys
    std::fill_n(to.softmax.largest, q.n, -std::numeric_limits<float>::max());
    std::fill_n(to.softmax.total, q.n, 0.0f);
    std::fill_n(to.out, q.n * cache_.head_dim, 0.0f);
    return;
  }
  if (n_rows > 1) {  // one after the other, where estimates have theirs otherwise
    const int64_t n = group_ * cache_.head_dim;
    for (int64_t i = 0; i < n_rows; ++i) {
      std::copy_n(queries(rows, row + i), n, space_.q(thread) + i * n);
    }
    q.data = space_.q(thread);
  }
  const int64_t together = kKeyBlock / cache_.archive->page_tokens();
  for (size_t begin = 0; begin < pages.size(); begin += together) {
    const TileSums part = begin == 0 ? to : space_.part(thread);
    attend_block(head, pages.subspan(begin, std::min<size_t>(together, pages.size() - begin)), q,
                 thread, part);
    if (begin > 0) merge_sums(kernels_, attention_, cache_.head_dim, part, to, 0, q.n);
  }
}

void Recall::attend_block(const ArchiveHead& head, std::span<const EstimatedPage> pages,
                          const Queries& q, int thread, const TileSums& to) const {
  const KvArchive& archive = *cache_.archive;
  const int64_t head_dim = cache_.head_dim;
  float* const exps = space_.exps(thread);
  int64_t n_keys = 0;
  for (const EstimatedPage& page : pages) {
    multiply_keys(head, page.page, q, exps + n_keys, thread);
    n_keys += head.counts[page.page];
  }
  for (int64_t i = 0; i < q.n; ++i) {
    float* const logits = exps + i * kExpsStride;
    if (attention_.softcap > 0) {  // logits are scaled later
      kernels_.softcap(logits, n_keys, attention_.softcap / attention_.scale);
    }
    to.softmax.total[i] =
        kernels_.exponentiate(logits, n_keys, attention_.scale, to.softmax.largest + i);
  }
  std::fill_n(to.out, q.n * head_dim, 0.0f);
  const auto add_rows = kernels_.of(archive.options().v_dtype).add_rows;
  n_keys = 0;
  for (const EstimatedPage& page : pages) {
    const int64_t n = head.counts[page.page];
    add_rows({.y = to.out,
              .p = exps + n_keys,
              .rows = archive.values(head, page.page),
              .n_out = q.n,
              .n_rows = n,
              .n = head_dim,
              .row_bytes = archive.v_row_bytes(),
              .p_stride = kExpsStride});
    n_keys += n;
  }
}

// The products of a page's keys with q: logits [queries, kExpsStride].
void Recall::multiply_keys(const ArchiveHead& head, int32_t page, const Queries& q, float* logits,
                           int thread) const {
  const KvArchive& archive = *cache_.archive;
  const int64_t n = head.counts[page];
  Matmul product{.y = logits,
                 .x = q.data,
                 .w = archive.keys(head, page),
                 .bias = nullptr,
                 .n_rows = q.n,
                 .n_in = cache_.head_dim,
                 .w_row_bytes = archive.k_row_bytes(),
                 .y_stride = kExpsStride,
                 .add = false};
  const auto matmul = kernels_.of(archive.options().k_dtype).matmul;
  if (!archive.has_grids()) {
    matmul(product, 0, n);
    return;
  }
  const float* const shifts = space_.shifts(thread);
  archive.grid(head, page).scale(q.data, q.n, space_.scaled(thread), space_.shifts(thread));
  product.x = space_.scaled(thread);
  matmul(product, 0, n);
  for (int64_t i = 0; i < q.n; ++i) {
    for (int64_t t = 0; t < n; ++t) logits[i * kExpsStride + t] += shifts[i];
  }
}

}  // namespace h2o
