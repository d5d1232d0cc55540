// Tile: rows of a segment with all query heads of one kv_head, which attend block by block of keys.
//
// The division into blocks is fixed and block sums are merged in order, so results do not depend,
// bit for bit, on how rows are grouped into tiles or blocks assigned to threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backend/backend.h"
#include "cpu/attention/segment_head.h"
#include "cpu/kernels.h"

namespace h2o {

// Small enough that the exponentials of a tile, keys and values stay in the L2 cache, large enough
// that merging costs almost nothing.
constexpr int64_t kKeyBlock = 512;

// Distance between the exponentials of one query and the next: a cache line is added, because rows
// 2 KiB apart would share a few sets of the L1 cache.
constexpr int64_t kExpsStride = kKeyBlock + 16;

// Partial softmax sums over some keys, for each query of a tile.
struct TileSums {
  SoftmaxSums softmax;  // [queries]
  float* out;           // [queries, head_dim]: exponentials times values
};

// Scratch of one thread.
struct TileScratch {
  float* q;           // [queries, head_dim]
  BF16* rounded_q;    // instead of q, if products with keys are rounded; in `staged`
  float* rotated;     // [kKeyBlock, head_dim] keys of rolling segments
  std::byte* staged;  // of split products: keys, values, and the workspace; see split_scratch()
};

// Are products with values split, and those with keys if their type allows it?
bool splits(const CpuKernels& kernels, const KvView& cache);

// Are products in bf16 supported, for attention that may round?
bool may_round(const CpuKernels& kernels, const KvView& cache);

// Bytes of TileScratch::staged for keys or for values, and in all.
int64_t staged_bytes(int64_t head_dim);
int64_t split_scratch(int64_t head_dim);

// Merges the sums over some keys into those over others, for queries [begin, end).
void merge_sums(const CpuKernels& kernels, const Attention& attention, int64_t head_dim,
                const TileSums& part, const TileSums& to, int64_t begin, int64_t end);

class Tile {
 public:
  // Query rows, over all heads of the group, that share reads of keys and values: fewer where
  // exponentials of `keys` keys would not stay in the L2 cache.
  static constexpr int64_t kFewQueries = 24;
  static constexpr int64_t kQueries = 48;
  static constexpr int64_t kCachedExps = 256 * 1024;
  static constexpr int64_t kBf16Queries = 96;  // of split or rounded products
  static int64_t rows(int64_t group, bool bf16, int64_t keys) {
    const int64_t queries =
        std::clamp(kCachedExps / keys, kFewQueries, bf16 ? kBf16Queries : kQueries);
    return group < queries ? queries / group : 1;
  }

  // Rows [first, first + n) of the segment.
  Tile(const CpuKernels& kernels, const Attention& attention, const SegmentHead& keys,
       int64_t first, int64_t n);

  const Segment& segment() const { return keys_.segment(); }
  int32_t kv_head() const { return keys_.kv_head(); }
  int64_t first() const { return first_; }  // row in the segment
  int64_t n_queries() const { return n_ * group_; }
  int64_t n_blocks() const { return n_blocks(n_queries() - 1); }
  int64_t n_blocks(int64_t query) const {  // visible to it
    return (keys_.n_visible(first_ + query / group_) + kKeyBlock - 1) / kKeyBlock;
  }

  void prefetch_next_head() const { keys_.prefetch_next(); }

  // Loads the queries to scratch.q or rounded_q.
  void load_queries(const TileScratch& scratch) const;

  // Computes the sums of one block for queries [begin, end), which load_queries() has loaded.
  // Leaves the exponentials [queries, kExpsStride], each row up to its last visible key, in `exps`.
  void attend(int64_t block, const TileScratch& scratch, float* exps, const TileSums& to,
              int64_t begin, int64_t end) const;

  // Merges the sums of a block, or of other keys visible to all queries, into those of the previous
  // blocks, for queries [begin, end).
  void merge(int64_t block, const TileSums& part, const TileSums& to, int64_t begin,
             int64_t end) const;
  void merge(const TileSums& part, const TileSums& to, int64_t begin, int64_t end) const;
  // Initializes the sums, with the attention sinks only.
  void start(const TileSums& sums, int64_t begin, int64_t end) const;

  // Writes the output of queries [begin, end) once the sums are complete.
  void write(const TileSums& sums, int64_t begin, int64_t end) const;

  // Converts the exponentials of a block, relative to `largest`, to the attention that its keys
  // received: [rows, kKeyBlock], in the exps of each row's first head.
  void weigh(int64_t block, const float* largest, const SoftmaxSums& all, float* exps) const;

  // Adds that attention to the scores, row by row. Overwrites it.
  void add_to_scores(int64_t block, float* received) const;

 private:
  // The first row of the tile to which keys of a block are visible.
  int64_t first_row(int64_t block) const {
    return std::max<int64_t>(0, block * kKeyBlock - keys_.n_visible(first_) + 1);
  }
  // Number of keys of a block visible to row i of the tile.
  int64_t n_keys(int64_t block, int64_t i) const {
    return std::min(kKeyBlock, keys_.n_visible(first_ + i) - block * kKeyBlock);
  }

  // Are products with keys rounded? Those of rolling segments are rotated, in float.
  bool rounds_logits() const { return in_bf16_ && !keys_.segment().rolling; }

  // Is attention limited by a window? For a single row the cache already keeps no token outside it,
  // except by blocks.
  bool windowed() const {
    return attention_.window > 0 && (attention_.in_blocks || keys_.segment().n_rows > 1);
  }

  class SplitBlock;
  void attend_split(int64_t block, const TileScratch& scratch, float* exps, const TileSums& to,
                    int64_t begin, int64_t end) const;
  void multiply(int64_t block, const TileScratch& scratch, float* logits, int64_t begin,
                int64_t end) const;
  void exponentiate(int64_t block, int64_t i, float* exps, const SoftmaxSums& to) const;
  void add_distances(int64_t block, int64_t i, float* logits) const;
  void exps_in_window(int64_t block, int64_t i, float* exps, const SoftmaxSums& to) const;
  int64_t set_beyond_window(int64_t block, int64_t row, float* p, float value) const;
  void rotate_keys(const SegmentHead::Parts& parts, float* rotated) const;
  void add_values(int64_t begin, int64_t end, int64_t n_queries, const float* exps,
                  float* out) const;
  int64_t head_of(int64_t i) const { return keys_.kv_head() * group_ + i % group_; }
  float* row_of(const Tensor& x, int64_t i) const;

  const CpuKernels& kernels_;
  const Attention& attention_;
  const SegmentHead& keys_;
  const KvView& cache_;
  const TypeKernels& k_kernels_;
  const TypeKernels& v_kernels_;
  const int64_t first_;
  const int64_t n_;
  const int64_t group_;  // query heads per kv_head
  const bool in_bf16_;
};

}  // namespace h2o
