// Tile: attention to a block of keys with split products (see SplitKernels).
#include <algorithm>
#include <array>

#include "cpu/attention/tile.h"

namespace h2o {
namespace {

// The smallest group of queries for which splitting pays: a single row splits keys and values for
// one group only, and must have the same bits as in a chunk.
constexpr int32_t kMinGroup = 7;

// Values that are staged at a time for few queries: they stay in the L1 cache.
constexpr int64_t kFewValues = 64;

}  // namespace

bool splits(const CpuKernels& kernels, const KvView& cache) {
  return kernels.of(cache.v_dtype).split != nullptr &&
         cache.n_heads >= kMinGroup * cache.n_kv_heads;
}

int64_t staged_bytes(int64_t head_dim) { return split_bytes(kKeyBlock, head_dim); }

int64_t split_scratch(int64_t head_dim) {
  return 2 * staged_bytes(head_dim) + kSplitWorkspace + split_bytes(kSplitRows, head_dim);
}

// One call of Tile::attend().
class Tile::SplitBlock {
 public:
  SplitBlock(const Tile& tile, int64_t block, const TileScratch& scratch, float* exps,
             const TileSums& to, int64_t n_keys)
      : tile_(tile),
        block_(block),
        scratch_(scratch),
        exps_(exps),
        to_(to),
        n_(n_keys),
        head_dim_(tile.cache_.head_dim),
        splits_keys_(tile.k_kernels_.split != nullptr && !tile.keys_.segment().rolling),
        staged_keys_(scratch.staged),
        staged_values_(staged_keys_ + staged_bytes(head_dim_)),
        workspace_(staged_values_ + staged_bytes(head_dim_)) {
    int64_t i = 0;
    for (const KvRows& part : tile.keys_.keys(block * kKeyBlock, block * kKeyBlock + n_keys)) {
      for (int64_t j = 0; j < part.n; ++j, ++i) {
        keys_[i] = part.k + j * tile.cache_.k_row_bytes;
        values_[i] = part.v + j * tile.cache_.v_row_bytes;
      }
    }
  }

  // All keys and values are staged; then some queries at a time attend to them, so that their
  // exponentials stay in the L1 cache.
  void attend(int64_t begin, int64_t end) const {
    if (splits_keys_) {
      tile_.k_kernels_.split->stage_keys(staged_keys_, keys_.data(), n_, head_dim_);
    }
    const bool finite = stage_values(values_, 0, n_);
    for (; begin < end; begin += kSplitRows) {
      const int64_t last = std::min(begin + kSplitRows, end);
      const int64_t n = n_visible(last - 1);
      if (splits_keys_) {
        tile_.kernels_.multiply_split(keys_product(begin, last, n));
      } else {
        tile_.multiply(block_, scratch_, exps_, begin, last);
      }
      exponentiate(begin, last, n);
      if (finite) {
        add_values(begin, last, 0, n);
      } else {
        add_values_one_by_one(begin, last, n);
      }
    }
  }

  // Mixes at most kSplitRows queries, with some values at a time.
  void attend_few(int64_t begin, int64_t end) const {
    if (splits_keys_) {
      tile_.k_kernels_.split->multiply_keys(keys_product(begin, end, n_), keys_.data());
    } else {
      tile_.multiply(block_, scratch_, exps_, begin, end);
    }
    exponentiate(begin, end, n_);
    bool finite = true;
    for (int64_t i = 0; i < n_; i += kFewValues) {
      const int64_t n = std::min(n_ - i, kFewValues);
      finite = stage_values(values_, i, n) && finite;
      add_values(begin, end, i, n);
    }
    if (!finite) add_values_one_by_one(begin, end, n_);
  }

 private:
  using Rows = std::array<const std::byte*, kKeyBlock>;

  int64_t n_visible(int64_t query) const { return tile_.n_keys(block_, query / tile_.group_); }

  bool stage_values(const Rows& values, int64_t first, int64_t n) const {
    return tile_.v_kernels_.split->stage_values(staged_values_, values.data() + first, n,
                                                head_dim_);
  }

  // Logits of the first n keys.
  SplitProduct keys_product(int64_t begin, int64_t end, int64_t n) const {
    return {.y = exps_ + begin * kExpsStride,
            .x = scratch_.q + begin * head_dim_,
            .staged = staged_keys_,
            .n_rows = end - begin,
            .n_in = head_dim_,
            .n_out = n,
            .n_columns = n_,
            .x_stride = head_dim_,
            .y_stride = kExpsStride,
            .add = false,
            .workspace = workspace_};
  }

  // Exponentiates the logits of n keys; those that a query does not see get 0.
  void exponentiate(int64_t begin, int64_t end, int64_t n) const {
    for (int64_t i = begin; i < end; ++i) {
      float* const power = exps_ + i * kExpsStride;
      tile_.exponentiate(block_, i, power, to_.softmax);
      std::fill(power + n_visible(i), power + n, 0.0f);
    }
  }

  // Sums over n staged values.
  void add_values(int64_t begin, int64_t end, int64_t first, int64_t n) const {
    tile_.kernels_.multiply_split({.y = to_.out + begin * head_dim_,
                                   .x = exps_ + begin * kExpsStride + first,
                                   .staged = staged_values_,
                                   .n_rows = end - begin,
                                   .n_in = n,
                                   .n_out = head_dim_,
                                   .n_columns = head_dim_,
                                   .x_stride = kExpsStride,
                                   .y_stride = head_dim_,
                                   .add = first > 0,
                                   .workspace = workspace_});
  }

  // Sums, for each query, only the values that it sees, because a value that is not finite times 0
  // is NaN. Replaces the sums and staged values.
  void add_values_one_by_one(int64_t begin, int64_t end, int64_t n) const {
    for (int64_t i = begin; i < end; ++i) {
      const float* const power = exps_ + i * kExpsStride;
      Rows seen;
      for (int64_t j = 0; j < n; ++j) seen[j] = power[j] != 0 ? values_[j] : nullptr;
      stage_values(seen, 0, n);
      add_values(i, i + 1, 0, n);
    }
  }

  const Tile& tile_;
  const int64_t block_;
  const TileScratch& scratch_;
  float* const exps_;
  const TileSums& to_;
  const int64_t n_;  // keys
  const int64_t head_dim_;
  const bool splits_keys_;
  std::byte* const staged_keys_;
  std::byte* const staged_values_;
  std::byte* const workspace_;
  Rows keys_, values_;
};

void Tile::attend_split(int64_t block, const TileScratch& scratch, float* exps, const TileSums& to,
                        int64_t begin, int64_t end) const {
  const SplitBlock keys(*this, block, scratch, exps, to, n_keys(block, (end - 1) / group_));
  if (end - begin <= kSplitRows) {
    keys.attend_few(begin, end);
  } else {
    keys.attend(begin, end);
  }
}

}  // namespace h2o
