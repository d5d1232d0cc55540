// Recall: queries attend to the pages of the archive that may matter most to them, besides the
// tokens that the cache keeps.
//
// Every row of a segment chooses its own pages, for all query heads that share the kv_head: those
// for which some head's estimate of their largest q.k is largest. So the bits of a result depend
// neither on which rows make a tile nor on which thread has them.
#pragma once

#include <cstdint>
#include <span>

#include "backend/backend.h"
#include "cpu/attention/tile.h"
#include "cpu/kernels.h"
#include "kv/archive.h"
#include "kv/view.h"

namespace h2o {

// A page that a row may recall.
struct EstimatedPage {
  float estimate;  // of its largest q.k
  int32_t page;

  // Of equals the older is recalled.
  bool before(const EstimatedPage& other) const {
    return estimate > other.estimate || (estimate == other.estimate && page < other.page);
  }
};

// What it computes with: of each thread, and the sums of all queries of a batch. Behind Workspace.
class RecallSpace {
 public:
  RecallSpace(const KvView& shape, int n_threads);

  size_t bytes() const {
    return (n_threads_ * thread_floats() + n_queries_ * (2 + head_dim_)) * sizeof(float);
  }

  // Of a thread.
  float* q(int thread) const {
    return base() + thread * thread_floats();
  }  // [queries, 2, head_dim]
  float* estimates(int thread) const { return q(thread) + 2 * tile_queries_ * head_dim_; }
  EstimatedPage* pages(int thread) const {  // [n_recalled]
    return reinterpret_cast<EstimatedPage*>(estimates(thread) + tile_queries_ * n_pages_);
  }
  float* powers(int thread) const {  // [group, kKeyBlock]
    return estimates(thread) + tile_queries_ * n_pages_ + kPageFloats * n_recalled_;
  }
  TileSums part(int thread) const {  // [group] of a block of keys
    return sums_at(powers(thread) + group_ * kKeyBlock, group_, 0);
  }

  // From a query of the batch on: [n_kv_heads, max_rows, group]
  TileSums sums(int64_t query) const {
    return sums_at(base() + n_threads_ * thread_floats(), n_queries_, query);
  }

 private:
  static constexpr int64_t kPageFloats = sizeof(EstimatedPage) / sizeof(float);

  float* base() const { return reinterpret_cast<float*>(workspace_ + begin_); }
  int64_t thread_floats() const;
  TileSums sums_at(float* at, int64_t n, int64_t query) const {
    return {{at + query, at + n + query}, at + 2 * n + query * head_dim_};
  }

  std::byte* workspace_;
  size_t begin_;  // there, in bytes
  int64_t n_threads_;
  int64_t group_;
  int64_t tile_queries_;
  int64_t head_dim_;
  int64_t n_pages_;
  int64_t n_recalled_;
  int64_t n_queries_;  // of a batch
};

class Recall {
 public:
  Recall(const CpuKernels& kernels, const Attention& attention, const KvView& cache, int n_threads)
      : kernels_(kernels),
        attention_(attention),
        cache_(cache),
        space_(cache, n_threads),
        group_(cache.n_heads / cache.n_kv_heads) {}

  // Is there anything to recall for a segment? What a window has passed is not archived.
  bool wanted(const Segment& segment) const {
    return cache_.archive != nullptr && attention_.window == 0 &&
           cache_.policies[segment.sequence].kept(segment.position) < segment.position;
  }

  // Rows [first, first + n) of a segment, at most a tile's.
  void attend(const Segment& segment, int32_t kv_head, int64_t first, int64_t n, int thread) const;

  // What that has given, in the order of a tile's queries.
  TileSums sums(const Segment& segment, int32_t kv_head, int64_t first) const {
    return space_.sums((int64_t{kv_head} * cache_.max_rows + segment.row + first) * group_);
  }

 private:
  std::span<const EstimatedPage> choose(const ArchiveHead& head, const float* estimates,
                                        int64_t n_pages, EstimatedPage* pages) const;
  void attend_block(const ArchiveHead& head, std::span<const EstimatedPage> pages, const float* q,
                    float* powers, const TileSums& to) const;

  const CpuKernels& kernels_;
  const Attention& attention_;
  const KvView& cache_;
  const RecallSpace space_;
  const int64_t group_;  // query heads that share a kv_head
};

}  // namespace h2o
