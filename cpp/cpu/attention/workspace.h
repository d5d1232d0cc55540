// Workspace of attention: per-thread buffers, and buffers of tiles whose keys are divided among
// threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "cpu/attention/tile.h"
#include "kv/view.h"

namespace h2o {

// The load is unbalanced with fewer tiles per thread.
constexpr int64_t kTilesPerThread = 8;

// Locations of a tile's sums and of those of its blocks.
struct TileSpace {
  TileSums all;
  TileSums blocks;    // of the first block; with space for only one, blocks reuse it
  float* exps;        // of the first block
  int64_t sums_step;  // stride in queries between the sums of consecutive blocks
  int64_t exps_step;  // stride between the exponentials of consecutive blocks
  int64_t queries;
  int64_t head_dim;

  TileSums block(int64_t i) const {
    return {{blocks.softmax.largest + i * queries, blocks.softmax.total + i * sums_step},
            blocks.out + i * sums_step * head_dim};
  }
  // Parts of one query, of the first n blocks.
  SoftmaxParts parts(int64_t query, int64_t n) const {
    const TileSums first = block(0);
    return {.largest = first.softmax.largest + query,
            .total = first.softmax.total + query,
            .out = first.out + query * head_dim,
            .largest_step = queries,
            .total_step = sums_step,
            .out_step = sums_step * head_dim,
            .n = n};
  }
  float* exps_of(int64_t block) const { return exps + block * exps_step; }
};

// Avoids false sharing.
constexpr int64_t whole_cache_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

// Parameters of a row's rotary table; zeroed memory is none.
struct RopeTag {
  const float* frequencies;
  float magnitude;
  int32_t position;

  bool operator==(const RopeTag&) const = default;
};

class Workspace {
 public:
  Workspace(const CpuKernels& kernels, const KvView& shape, int n_threads)
      : base_(reinterpret_cast<float*>(shape.workspace)),
        n_threads_(n_threads),
        group_(shape.n_heads / shape.n_kv_heads),
        head_dim_(shape.head_dim),
        largest_head_dim_(shape.largest_head_dim),
        max_rows_(shape.max_rows),
        keys_(int64_t{shape.slots} + shape.max_rows),
        blocks_((keys_ + kKeyBlock - 1) / kKeyBlock),
        scores_(shape.scores != nullptr),
        rolls_(shape.ranks != nullptr),
        splits_(splits(kernels, shape)),
        in_bf16_(may_round(kernels, shape)),
        tile_rows_(Tile::rows(group_, splits_ || in_bf16_, scores_ ? keys_ : kKeyBlock)),
        queries_(tile_rows_ * group_) {
    const int64_t tiles =
        (shape.n_sequences + shape.max_rows / tile_rows_ + 1) * int64_t{shape.n_kv_heads};
    n_tiles_ = n_threads == 1 ? 0 : std::min(tiles, kTilesPerThread * n_threads);
  }

  size_t bytes() const {
    return (rope_floats() + n_threads_ * thread_floats() + n_tiles_ * tile_floats()) *
           sizeof(float);
  }

  // Rotary table of a row of the batch. All layers share it, as they share the workspace.
  RopeTag& rope_tag(int64_t row) const {
    return *reinterpret_cast<RopeTag*>(base_ + row * rope_row_floats());
  }
  float* rope_table(int64_t row) const {  // [n_rot]
    return reinterpret_cast<float*>(&rope_tag(row) + 1);
  }

  int64_t tile_rows() const { return tile_rows_; }

  // Maximum number of tiles whose keys are divided among threads.
  int64_t n_tiles() const { return n_tiles_; }

  // Memory of a thread.
  float* q(int thread) const { return at(thread).q; }  // [queries, head_dim]
  TileScratch scratch(int thread) const { return at(thread); }
  // [keys] victims, importances or ranks
  std::byte* victims(int thread) const {
    return reinterpret_cast<std::byte*>(at(thread).rotated + rotated_floats());
  }
  TileSpace of_thread(int thread) const {
    return space(at(thread).rotated + rotated_floats() + victim_floats(), 1);
  }

  // Space of a tile whose blocks threads divide. Without scores, its exponentials are not read
  // again.
  TileSpace of_tile(int64_t tile, int thread) const {
    float* const tiles = base_ + rope_floats() + n_threads_ * thread_floats();
    TileSpace shared = space(tiles + tile * tile_floats(), blocks_);
    if (!scores_) shared.exps = of_thread(thread).exps;
    return shared;
  }

 private:
  TileScratch at(int thread) const {
    float* const begin = base_ + rope_floats() + thread * thread_floats();
    float* const q = begin + staged_floats();
    return {q, reinterpret_cast<BF16*>(begin), q + whole_cache_lines(queries_ * head_dim_),
            reinterpret_cast<std::byte*>(begin)};
  }

  int64_t rope_row_floats() const {
    return whole_cache_lines(int64_t{sizeof(RopeTag) / sizeof(float)} + largest_head_dim_);
  }
  int64_t rope_floats() const { return max_rows_ * rope_row_floats(); }
  int64_t staged_floats() const {
    if (in_bf16_) return whole_cache_lines(queries_ * head_dim_ / 2);  // then nothing is split
    return splits_ ? split_scratch(head_dim_) / int64_t{sizeof(float)} : 0;
  }
  int64_t rotated_floats() const { return rolls_ ? whole_cache_lines(kKeyBlock * head_dim_) : 0; }
  int64_t victim_floats() const {
    return whole_cache_lines(std::max(keys_ * int64_t{sizeof(Victim) / sizeof(float)}, head_dim_));
  }
  int64_t sums_floats(int64_t n_blocks) const {
    return whole_cache_lines(queries_ * (2 + head_dim_ + blocks_ + n_blocks * (1 + head_dim_)));
  }
  int64_t exps_floats(int64_t n_blocks) const { return n_blocks * queries_ * kExpsStride; }
  int64_t thread_floats() const {
    return staged_floats() + whole_cache_lines(queries_ * head_dim_) + rotated_floats() +
           victim_floats() + sums_floats(1) + exps_floats(scores_ ? blocks_ : 1);
  }
  int64_t tile_floats() const { return sums_floats(blocks_) + exps_floats(scores_ ? blocks_ : 0); }

  // Sums for n_blocks blocks at once: one or all of them.
  TileSpace space(float* at, int64_t n_blocks) const {
    float* const exps = at + sums_floats(n_blocks);
    const auto take = [&at](int64_t n) { return std::exchange(at, at + n); };
    TileSpace space;
    space.queries = queries_;
    space.head_dim = head_dim_;
    space.sums_step = n_blocks == 1 ? 0 : queries_;
    space.exps_step = scores_ ? queries_ * kExpsStride : 0;
    space.all = {{take(queries_), take(queries_)}, take(queries_ * head_dim_)};
    space.blocks = {{take(blocks_ * queries_), take(n_blocks * queries_)},
                    take(n_blocks * queries_ * head_dim_)};
    space.exps = exps;
    return space;
  }

  float* base_;
  int64_t n_threads_;
  int64_t n_tiles_;
  int64_t group_;
  int64_t head_dim_;
  int64_t largest_head_dim_;
  int64_t max_rows_;
  int64_t keys_;    // maximum
  int64_t blocks_;  // maximum
  bool scores_;
  bool rolls_;
  bool splits_;
  bool in_bf16_;
  int64_t tile_rows_;
  int64_t queries_;  // per tile
};

}  // namespace h2o
