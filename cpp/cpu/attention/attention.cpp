#include "cpu/attention/attention.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <span>

#include "cpu/attention/archive.h"
#include "cpu/attention/drafts.h"
#include "cpu/attention/evict.h"
#include "cpu/attention/recall.h"
#include "cpu/attention/rotate.h"
#include "cpu/attention/segment_head.h"
#include "cpu/attention/tile.h"
#include "cpu/attention/workspace.h"

namespace h2o {
namespace {

// Minimum queries in a part of a tile: a thread reads the keys, or merges sums, for all of them.
constexpr int64_t kMinQueries = 8;

// Work units per thread, for load balancing.
constexpr int64_t kUnitsPerThread = 4;

// Cost of merging one number, in multiply-adds.
constexpr int64_t kMergeCost = 16;

// One turn of attend().
class Attend {
 public:
  Attend(const CpuKernels& kernels, ThreadPool& pool, const Attention& attention,
         const KvView& cache, std::span<const Segment> segments)
      : kernels_(kernels),
        pool_(pool),
        attention_(attention),
        cache_(cache),
        segments_(segments),
        group_(cache.n_heads / cache.n_kv_heads),
        work_(kernels, cache, pool.size()),
        tile_rows_(work_.tile_rows()) {
    if (cache.archive != nullptr) recall_.emplace(kernels, attention, cache, work_, pool.size());
    for (const Segment& segment : segments) {
      const int64_t keys = n_keys(segment);
      n_rows_ += segment.n_rows;
      n_tiles_ += n_tiles(segment);
      n_logits_ += segment.n_rows * keys * cache.n_heads;
      n_keys_ += keys * cache.n_kv_heads;
      scores_ = scores_ || keeps_scores(segment);
      recalls_ = recalls_ || recalls(segment);
    }
  }

  // Copies what the rows, drafts, will overwrite.
  void record(const KvUndo& undo) {
    parallel(
        n_keys_, [this](const Segment&) { return cache_.n_kv_heads; },
        [&](int, const Segment& draft, int64_t kv_head, int64_t) {
          record_draft(cache_, undo, draft, static_cast<int32_t>(kv_head), archives(kv_head));
        });
  }

  // Returns how many new keys and values were clamped.
  int64_t run() {
    store();
    if (recalls_) recall();
    const int64_t work = 2 * n_logits_ * cache_.head_dim;
    if (work < kParallelWork || divides_evenly(n_tiles_)) {
      by_tiles(work);
    } else {
      by_blocks(work);
    }
    if (attention_.evicts) evict();
    return n_clamped_;
  }

 private:
  bool keeps_scores(const Segment& segment) const {
    return cache_.policies[segment.sequence].keeps_scores();
  }
  // Are its evicted tokens archived? Those outside a window are not.
  bool archives(int64_t kv_head) const {
    return recall_ && attention_.window == 0 && cache_.archive_heads[kv_head] >= 0;
  }
  bool recalls(const Segment& segment) const { return recall_ && recall_->wanted(segment); }
  bool recalls(const Tile& tile) const {
    return recall_ && recall_->wanted(tile.segment(), tile.kv_head());
  }
  int64_t n_keys(const Segment& segment) const {  // at most
    return std::min(segment.position, cache_.slots) + int64_t{segment.n_rows};
  }
  int64_t n_blocks(const Segment& segment) const {
    return (n_keys(segment) + kKeyBlock - 1) / kKeyBlock;
  }
  int64_t n_tiles(const Segment& segment) const {
    return (segment.n_rows + tile_rows_ - 1) / tile_rows_ * cache_.n_kv_heads;
  }

  // Enumerates n(segment) items for each segment, consecutively over all segments, and calls
  // body(segment, index in the segment, first tile of the segment) for items [begin, end).
  template <class Count, class Body>
  void for_range(int64_t begin, int64_t end, const Count& n, const Body& body) const {
    int64_t before = 0;
    int64_t tile = 0;
    for (const Segment& segment : segments_) {
      const int64_t after = before + n(segment);
      for (int64_t i = std::max(begin, before); i < std::min(end, after); ++i) {
        body(segment, i - before, tile);
      }
      before = after;
      tile += n_tiles(segment);
    }
  }
  template <class Count, class Body>
  void parallel(int64_t work, const Count& n, const Body& body) {
    int64_t total = 0;
    for (const Segment& segment : segments_) total += n(segment);
    pool_.parallel_for(total, work, [&](int thread, int64_t begin, int64_t end) {
      for_range(begin, end, n, [&](const Segment& segment, int64_t i, int64_t tile) {
        body(thread, segment, i, tile);
      });
    });
  }

  // Consecutive tiles belong to one kv_head, so that its keys stay in cache.
  template <class Body>
  void with_tile(const Segment& segment, int64_t i, const Body& body) const {
    const int64_t per_head = n_tiles(segment) / cache_.n_kv_heads;
    const SegmentHead keys(cache_, segment, static_cast<int32_t>(i / per_head));
    const int64_t first = i % per_head * tile_rows_;
    body(Tile(kernels_, attention_, keys, first, std::min(tile_rows_, segment.n_rows - first)));
  }

  // Rotates queries and, except in rolling segments, keys, and stores the new rows, if there are
  // any.
  void store() {
    pool_.parallel_for(
        n_rows_, n_rows_ * attention_.q.cols, [&](int thread, int64_t begin, int64_t end) {
          float* const scratch = reinterpret_cast<float*>(work_.victims(thread));
          int64_t n_clamped = 0;
          for_range(
              begin, end, [](const Segment& segment) { return segment.n_rows; },
              [&](const Segment& segment, int64_t row, int64_t) {
                if (attention_.rope.layout != RopeLayout::none) rotate(segment, row);
                for (int32_t kv_head = 0; attention_.k && kv_head < cache_.n_kv_heads; ++kv_head) {
                  n_clamped += SegmentHead(cache_, segment, kv_head)
                                   .store(kernels_, attention_, static_cast<int32_t>(row), scratch);
                }
              });
          if (n_clamped > 0) n_clamped_ += n_clamped;
        });
  }

  void rotate(const Segment& segment, int64_t row) const {
    const Rope& rope = attention_.rope;
    const int32_t before = segment.rolling
                               ? cache_.policies[segment.sequence].kept(segment.position)
                               : segment.position;
    const RopeTag wanted{rope.frequencies.floats(), rope.magnitude,
                         before + static_cast<int32_t>(row)};
    float* const rope_table = work_.rope_table(segment.row + row);
    if (RopeTag& tag = work_.rope_tag(segment.row + row); tag != wanted) {
      compute_rope_table(rope_table, rope, wanted.position);
      tag = wanted;
    }
    const auto rotate_heads = [&](const Tensor& x) {
      float* const first = x.floats() + (segment.row + row) * x.cols;
      for (float* head = first; head < first + x.cols; head += cache_.head_dim) {
        h2o::rotate(kernels_, head, rope_table, rope);
      }
    };
    rotate_heads(attention_.q);
    if (attention_.k && !segment.rolling) rotate_heads(attention_.k);
  }

  // Computes the archive's contribution to each tile.
  void recall() {
    const std::span<const int32_t> heads = cache_.archive->kv_heads(cache_.layer);
    const auto rows = [&](const Segment& segment, int64_t i) -> TileRows {
      const int64_t per_head = n_tiles(segment) / cache_.n_kv_heads;
      const int64_t first = i % per_head * tile_rows_;
      return {segment, heads[i / per_head], first, std::min(tile_rows_, segment.n_rows - first)};
    };
    const auto tiles = [&](const Segment& segment) {
      return recalls(segment) ? n_tiles(segment) / cache_.n_kv_heads * std::ssize(heads) : 0;
    };
    int64_t n_recalling = 0;
    for (const Segment& segment : segments_) n_recalling += tiles(segment);
    // The workspace has room for the parts of some tiles; those that recall nothing count too.
    if (divides_evenly(n_recalling) || n_tiles_ > work_.n_tiles()) {
      pool_.for_each(n_recalling, [&](int thread, int64_t index) {
        for_range(index, index + 1, tiles, [&](const Segment& segment, int64_t i, int64_t) {
          recall_->attend(rows(segment, i), thread);
        });
      });
      return;
    }
    int64_t n_recalled = 0;  // tokens
    int64_t n_searched = 0;  // pages
    for (const Segment& segment : segments_) {
      if (!recalls(segment)) continue;
      n_searched += segment.n_rows * recall_->n_parts(segment) * kPartPages;
      n_recalled += int64_t{segment.n_rows} * cache_.archive->layout().n_recalled *
                    cache_.archive->page_tokens();
    }
    const int64_t numbers = 2 * std::ssize(heads) * group_ * cache_.head_dim;
    parallel(
        numbers * n_searched,
        [&](const Segment& segment) { return tiles(segment) * recall_->n_parts(segment); },
        [&](int thread, const Segment& segment, int64_t i, int64_t first_tile) {
          const int64_t n_parts = recall_->n_parts(segment);
          recall_->search(rows(segment, i / n_parts), first_tile + i / n_parts, i % n_parts,
                          thread);
        });
    parallel(numbers * n_recalled, tiles,
             [&](int thread, const Segment& segment, int64_t i, int64_t first_tile) {
               recall_->attend_found(rows(segment, i), first_tile + i, thread);
             });
  }

  // Merges that contribution into the sums of a tile.
  void merge_recalled(const Tile& tile, const TileSums& to, int64_t begin, int64_t end) const {
    if (recalls(tile)) {
      tile.merge(recall_->sums(tile.segment(), tile.kv_head(), tile.first()), to, begin, end);
    }
  }

  // Are there enough tiles to keep all threads busy? Then exponentials are still in cache when they
  // are read again.
  bool divides_evenly(int64_t n_tiles) const {
    return pool_.size() == 1 || n_tiles >= kTilesPerThread * pool_.size() ||
           (segments_.size() == 1 && n_tiles % pool_.size() == 0);
  }

  // Each thread processes all keys of a tile.
  void by_tiles(int64_t work) {
    const auto tiles = [this](const Segment& segment) { return n_tiles(segment); };
    const auto attend = [this](int thread, const Segment& segment, const Tile& tile) {
      attend_all(tile, thread, keeps_scores(segment));
    };
    const auto score = [this](int thread, const Segment& segment, const Tile& tile) {
      if (!keeps_scores(segment)) return;
      const TileSpace space = work_.of_thread(thread);
      for (int64_t block = 0; block < tile.n_blocks(); ++block) {
        tile.add_to_scores(block, space.exps_of(block));
      }
    };
    if (work < kParallelWork || pool_.size() == 1) {
      for_range(0, n_tiles_, tiles, [&](const Segment& segment, int64_t i, int64_t) {
        with_tile(segment, i, [&](const Tile& tile) {
          attend(0, segment, tile);
          score(0, segment, tile);
        });
      });
      return;
    }
    const auto for_tile = [&](const auto& body) {
      return [&](int thread, int64_t index) {
        for_range(index, index + 1, tiles, [&](const Segment& segment, int64_t i, int64_t) {
          with_tile(segment, i, [&](const Tile& tile) { body(thread, segment, tile); });
        });
      };
    };
    if (scores_) {  // tiles add to a kv_head's scores in order
      pool_.in_order(n_tiles_, for_tile(attend), for_tile(score));
    } else {
      pool_.for_each(n_tiles_, for_tile(attend));
    }
  }

  void attend_all(const Tile& tile, int thread, bool scored) const {
    const TileSpace space = work_.of_thread(thread);
    const int64_t n_queries = tile.n_queries();
    // The sums of a single block are final, unless there are sinks or recalled keys.
    const bool merged = tile.n_blocks() > 1 || attention_.sinks || recalls(tile);
    const auto sums_of = [&](int64_t block) { return merged ? space.block(block) : space.all; };
    tile.prefetch_next_head();
    tile.load_queries(work_.scratch(thread));
    if (merged) tile.start(space.all, 0, n_queries);
    for (int64_t block = 0; block < tile.n_blocks(); ++block) {
      tile.attend(block, work_.scratch(thread), space.exps_of(block), sums_of(block), 0, n_queries);
      if (merged) tile.merge(block, sums_of(block), space.all, 0, n_queries);
    }
    merge_recalled(tile, space.all, 0, n_queries);
    tile.write(space.all, 0, n_queries);
    for (int64_t block = 0; scored && block < tile.n_blocks(); ++block) {
      tile.weigh(block, sums_of(block).softmax.largest, space.all.softmax, space.exps_of(block));
    }
  }

  // Divides the keys of each tile among threads, and its queries too if there is not enough work.
  void by_blocks(int64_t work) {
    const auto queries = [this](const Segment& segment) {  // of a tile, at most
      return std::min<int64_t>(tile_rows_, segment.n_rows) * group_;
    };
    int64_t n_units = 0;
    for (const Segment& segment : segments_) n_units += n_tiles(segment) * n_blocks(segment);
    const int64_t wanted = std::max<int64_t>(1, kUnitsPerThread * pool_.size() / n_units);
    const auto n_parts = [&](const Segment& segment) {
      return std::min(wanted, (queries(segment) + kMinQueries - 1) / kMinQueries);
    };
    parallel(
        work,
        [&](const Segment& segment) {
          return n_tiles(segment) * n_blocks(segment) * n_parts(segment);
        },
        [&](int thread, const Segment& segment, int64_t i, int64_t first_tile) {
          const int64_t n = n_parts(segment);
          const int64_t block = i / n % n_blocks(segment);
          const int64_t index = i / n / n_blocks(segment);
          with_tile(segment, index, [&](const Tile& tile) {
            const int64_t n_queries = (queries(segment) + n - 1) / n;
            const int64_t begin = i % n * n_queries;
            const int64_t end = std::min(begin + n_queries, tile.n_queries());
            if (block >= tile.n_blocks() || begin >= end) return;
            const TileSpace space = work_.of_tile(first_tile + index, thread);
            tile.load_queries(work_.scratch(thread));
            tile.attend(block, work_.scratch(thread), space.exps_of(block), space.block(block),
                        begin, end);
          });
        });

    parallel(
        kMergeCost * n_logits_ / kKeyBlock * cache_.head_dim,
        [&](const Segment& segment) { return n_tiles(segment) * queries(segment); },
        [&](int thread, const Segment& segment, int64_t i, int64_t first_tile) {
          const int64_t index = i / queries(segment);
          const int64_t query = i % queries(segment);
          with_tile(segment, index, [&](const Tile& tile) {
            if (query >= tile.n_queries()) return;
            const TileSpace space = work_.of_tile(first_tile + index, thread);
            tile.start(space.all, query, query + 1);
            const SoftmaxSums sums{space.all.softmax.largest + query,
                                   space.all.softmax.total + query};
            kernels_.merge_parts(sums, space.all.out + query * cache_.head_dim,
                                 space.parts(query, tile.n_blocks(query)), cache_.head_dim,
                                 attention_.scale);
            merge_recalled(tile, space.all, query, query + 1);
            tile.write(space.all, query, query + 1);
          });
        });

    if (!scores_) return;
    parallel(
        n_logits_,
        [this](const Segment& segment) {
          return keeps_scores(segment) ? cache_.n_kv_heads * n_blocks(segment) : 0;
        },
        [this](int thread, const Segment& segment, int64_t i, int64_t first_tile) {
          const int64_t block = i % n_blocks(segment);
          const int64_t per_head = n_tiles(segment) / cache_.n_kv_heads;
          const int64_t first = i / n_blocks(segment) * per_head;
          for (int64_t index = first; index < first + per_head; ++index) {
            with_tile(segment, index, [&](const Tile& tile) {
              if (block >= tile.n_blocks()) return;
              const TileSpace space = work_.of_tile(first_tile + index, thread);
              float* const exps = space.exps_of(block);
              tile.weigh(block, space.block(block).softmax.largest, space.all.softmax, exps);
              tile.add_to_scores(block, exps);
            });
          }
        });
  }

  // Evicts the tokens over the budget.
  void evict() {
    parallel(
        n_keys_, [this](const Segment&) { return cache_.n_kv_heads; },
        [this](int thread, const Segment& segment, int64_t kv_head, int64_t) {
          const SegmentHead keys(cache_, segment, static_cast<int32_t>(kv_head));
          std::byte* const scratch = work_.victims(thread);
          std::optional<ArchiveWriter> archive;
          if (archives(kv_head)) {
            archive.emplace(kernels_, cache_, segment.sequence, keys.kv_head(), work_.q(thread));
          }
          if (!keys.fits()) {
            admit_chunk(cache_, keys.head(), keys.chunk(), segment, archive ? &*archive : nullptr,
                        reinterpret_cast<Victim*>(scratch));
          } else if (select_next_slot(kernels_, keys.head(), segment,
                                      reinterpret_cast<float*>(scratch)) &&
                     archive) {
            archive_next_slot(cache_, keys.head(), segment, *archive);
          }
        });
  }

  const CpuKernels& kernels_;
  ThreadPool& pool_;
  const Attention& attention_;
  const KvView& cache_;
  const std::span<const Segment> segments_;
  const int64_t group_;  // query heads per kv_head
  const Workspace work_;
  const int64_t tile_rows_;
  std::optional<Recall> recall_;  // if there is an archive
  int64_t n_rows_ = 0;
  int64_t n_tiles_ = 0;
  int64_t n_logits_ = 0;  // maximum
  int64_t n_keys_ = 0;    // over all kv_heads
  std::atomic<int64_t> n_clamped_ = 0;
  bool scores_ = false;   // does any segment's policy use scores?
  bool recalls_ = false;  // does any segment recall archived tokens?
};

}  // namespace

size_t attend_workspace(const CpuKernels& kernels, const KvView& shape, int n_threads) {
  const Workspace workspace(kernels, shape, n_threads);
  if (shape.archive == nullptr) return workspace.bytes();
  return workspace.bytes() + RecallSpace(workspace, shape, n_threads).bytes();
}

int64_t attend(const CpuKernels& kernels, ThreadPool& pool, const Attention& attention,
               const KvView& cache, const Batch& batch) {
  // Consecutive segments of a sequence come one after another too.
  const auto same_sequence = [](const Segment& a, const Segment& b) {
    return a.sequence == b.sequence;
  };
  const std::span<const Segment> first = batch.turn(0);
  int64_t n_clamped = 0;
  for (auto begin = first.begin(); begin != first.end();) {
    auto end = std::adjacent_find(begin, first.end(), same_sequence);
    if (end != first.end()) ++end;
    n_clamped += Attend(kernels, pool, attention, cache, std::span(begin, end)).run();
    begin = end;
  }
  for (int32_t turn = 1; turn < batch.n_turns(); ++turn) {
    Attend drafts(kernels, pool, attention, cache, batch.turn(turn));
    drafts.record(batch.journal->layer(cache.layer));
    n_clamped += drafts.run();
  }
  return n_clamped;
}

}  // namespace h2o
