#include "cpu/attention/recall.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/attention/workspace.h"

namespace h2o {
namespace {

constexpr int64_t kBlockPages = kKeyBlock / kPageTokens;  // that are attended to together

// How far from the middle of a page's keys one of them is taken to be, of as far as it may. At 1 an
// estimate is a bound, which no key comes near: it would be at the limit in every dimension.
constexpr float kReach = 0.5f;

}  // namespace

RecallSpace::RecallSpace(const KvView& shape, int n_threads)
    : workspace_(shape.workspace),
      begin_(Workspace(shape, n_threads).bytes()),
      n_threads_(n_threads),
      group_(shape.n_heads / shape.n_kv_heads),
      tile_queries_(Tile::rows(group_) * group_),
      head_dim_(shape.head_dim),
      n_pages_(shape.archive->n_pages()),
      n_recalled_(std::min(shape.archive->options().n_recalled, shape.archive->n_pages())),
      n_queries_(int64_t{shape.n_heads} * shape.max_rows) {}

int64_t RecallSpace::thread_floats() const {
  const int64_t floats = tile_queries_ * (2 * head_dim_ + n_pages_) + kPageFloats * n_recalled_ +
                         group_ * (kKeyBlock + 2 + head_dim_);
  return (floats + 15) / 16 * 16;  // whole cache lines
}

void Recall::attend(const Segment& segment, int32_t kv_head, int64_t first, int64_t n,
                    int thread) const {
  const KvArchive& archive = *cache_.archive;
  const ArchiveHead head = archive.head(cache_.layer, segment.sequence, kv_head);
  const int64_t head_dim = cache_.head_dim;
  const int64_t n_pages = (segment.position - 1) / kPageTokens + 1;
  const float* const q = attention_.q.floats() + (segment.row + first) * attention_.q.cols +
                         kv_head * group_ * head_dim;

  // An estimate of the largest q.k, the sum of q (largest + smallest) / 2 and of
  // kReach |q| (largest - smallest) / 2, is a product with both of them.
  float* const parts = space_.q(thread);
  for (int64_t i = 0; i < n * group_; ++i) {
    const float* const from = q + i / group_ * attention_.q.cols + i % group_ * head_dim;
    float* const to = parts + 2 * i * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) {
      to[d] = (from[d] + kReach * std::abs(from[d])) / 2;
      to[head_dim + d] = (from[d] - kReach * std::abs(from[d])) / 2;
    }
  }
  float* const estimates = space_.estimates(thread);
  kernels_.of(KvArchive::kBoundsType)
      .matmul({.y = estimates,
               .x = parts,
               .w = head.bounds,
               .bias = nullptr,
               .n_rows = n * group_,
               .n_in = 2 * head_dim,
               .w_row_bytes = archive.bounds_bytes(),
               .y_stride = n_pages,
               .add = false},
              0, n_pages);

  const TileSums sums = this->sums(segment, kv_head, first);
  for (int64_t row = 0; row < n; ++row) {
    const auto pages =
        choose(head, estimates + row * group_ * n_pages, n_pages, space_.pages(thread));
    const TileSums to{{sums.softmax.largest + row * group_, sums.softmax.total + row * group_},
                      sums.out + row * group_ * head_dim};
    for (size_t begin = 0; begin < pages.size(); begin += kBlockPages) {
      const TileSums part = begin == 0 ? to : space_.part(thread);
      attend_block(head, pages.subspan(begin, std::min<size_t>(kBlockPages, pages.size() - begin)),
                   q + row * attention_.q.cols, space_.powers(thread), part);
      if (begin > 0) merge_sums(kernels_, attention_, head_dim, part, to, 0, group_);
    }
  }
}

// The pages of which some query head's estimate is largest, in their order. There is at least one.
std::span<const EstimatedPage> Recall::choose(const ArchiveHead& head, const float* estimates,
                                              int64_t n_pages, EstimatedPage* pages) const {
  const int64_t most = std::min<int64_t>(cache_.archive->options().n_recalled, n_pages);
  const auto before = [](const EstimatedPage& a, const EstimatedPage& b) { return a.before(b); };
  int64_t n = 0;
  for (int64_t page = 0; page < n_pages; ++page) {
    if (head.counts[page] == 0) continue;
    float estimate = -std::numeric_limits<float>::max();
    for (int64_t i = 0; i < group_; ++i) {
      const float other = estimates[i * n_pages + page];
      estimate = other > estimate ? other : estimate;  // not by NaN
    }
    const EstimatedPage candidate{estimate, static_cast<int32_t>(page)};
    if (n < most) {
      pages[n++] = candidate;
      if (n == most) std::make_heap(pages, pages + n, before);
    } else if (candidate.before(pages[0])) {  // the last of those chosen so far
      std::pop_heap(pages, pages + n, before);
      pages[n - 1] = candidate;
      std::push_heap(pages, pages + n, before);
    }
  }
  std::sort(pages, pages + n,
            [](const EstimatedPage& a, const EstimatedPage& b) { return a.page < b.page; });
  return {pages, static_cast<size_t>(n)};
}

// The query heads of one row, q [group, head_dim].
void Recall::attend_block(const ArchiveHead& head, std::span<const EstimatedPage> pages,
                          const float* q, float* powers, const TileSums& to) const {
  const KvArchive& archive = *cache_.archive;
  const int64_t head_dim = cache_.head_dim;
  const auto k_matmul = kernels_.of(archive.options().k_dtype).matmul;
  int64_t n_keys = 0;
  for (const EstimatedPage& page : pages) {
    k_matmul({.y = powers + n_keys,
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
    float* const logits = powers + i * kKeyBlock;
    if (attention_.softcap > 0) {  // of logits that are yet to be scaled
      kernels_.softcap(logits, n_keys, attention_.softcap / attention_.scale);
    }
    to.softmax.total[i] = kernels_.powers(logits, n_keys, attention_.scale, to.softmax.largest + i);
  }
  std::fill_n(to.out, group_ * head_dim, 0.0f);
  const auto add_rows = kernels_.of(archive.options().v_dtype).add_rows;
  n_keys = 0;
  for (const EstimatedPage& page : pages) {
    const int64_t n = head.counts[page.page];
    add_rows({.y = to.out,
              .p = powers + n_keys,
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
