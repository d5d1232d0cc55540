#include "cpu/attention/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

#include "cpu/attention/evict.h"
#include "cpu/attention/rotate.h"
#include "kv/rows.h"

namespace h2o {
namespace {

// Query rows, over all heads of the group, that read the keys and values together.
constexpr int64_t kTileQueries = 24;

int64_t tile_rows(int64_t group) { return std::max<int64_t>(1, kTileQueries / group); }

// Consecutive keys and values.
struct KvRows {
  const std::byte* k;
  const std::byte* v;
  float* scores;             // nullptr when the policy keeps none
  const int32_t* positions;  // nullptr where they are consecutive, from `first` on
  int32_t first;
  int64_t n;

  int32_t position(int64_t i) const {
    return positions != nullptr ? positions[i] : first + static_cast<int32_t>(i);
  }
};

// |v|_1 in f32, in order; finite whatever v is, so that importances have an order.
float value_norm(const float* v, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += std::abs(v[i]);
  constexpr float kLargest = std::numeric_limits<float>::max();
  return sum < kLargest ? sum : kLargest;
}

// Where the arrays of one call lie in its workspace.
struct Workspace {
  explicit Workspace(const KvView& cache, std::byte* base = nullptr) {
    const int64_t group = cache.n_heads / cache.n_kv_heads;
    const int64_t queries = tile_rows(group) * group;
    const int64_t keys = int64_t{cache.slots} + cache.max_rows;
    int64_t taken = 0;
    const auto take = [&](int64_t n) {
      // Without a base only the size is wanted.
      float* const first = base == nullptr ? nullptr : reinterpret_cast<float*>(base) + taken;
      taken += n;
      return first;
    };
    stride = keys;
    q = take(queries * cache.head_dim);
    out = take(queries * cache.head_dim);
    logits = take(queries * keys);
    victims = reinterpret_cast<Victim*>(take(keys * (sizeof(Victim) / sizeof(float))));
    rotated = take(cache.ranks != nullptr ? keys * cache.head_dim : 0);
    bytes = taken * static_cast<int64_t>(sizeof(float));
  }

  int64_t stride;   // of logits: as many as there can be keys
  float* q;         // [queries, head_dim] of a tile, side by side
  float* out;       // [queries, head_dim]
  float* logits;    // [queries, stride]
  Victim* victims;  // [stride]
  float* rotated;   // [stride, head_dim] keys of a rolling segment
  size_t bytes;
};

// One segment against one kv_head.
class HeadStep {
 public:
  HeadStep(const CpuKernels& kernels, const Attention& attention, const KvView& cache,
           const Segment& segment, int32_t kv_head, std::byte* workspace)
      : kernels_(kernels),
        k_kernels_(kernels.of(cache.k_dtype)),
        v_kernels_(kernels.of(cache.v_dtype)),
        attention_(attention),
        cache_(cache),
        segment_(segment),
        kv_head_(kv_head),
        head_(cache.head(segment.sequence, kv_head)),
        chunk_(cache.chunk(kv_head, segment.row)),
        group_(cache.n_heads / cache.n_kv_heads),
        kept_(head_.policy.kept(segment.position)),
        written_(std::min(segment.position, head_.slots)),
        first_(*head_.next_slot),
        fits_(int64_t{kept_} + segment.n_rows <= head_.slots),
        work_(cache, workspace),
        keys_(where_keys_are()) {}

  void run() {
    // New rows that fit go straight to their slots; otherwise they wait in the chunk, because
    // nothing is evicted before every row of the segment has attended.
    for (int32_t row = 0; row < segment_.n_rows; ++row) {
      store(row,
            fits_ ? slot_row(cache_, head_, first_ + row) : chunk_row(cache_, head_, chunk_, row));
      if (fits_) enter(first_ + row, row);
    }
    if (segment_.rolling) rotate_keys();
    const auto tile = static_cast<int32_t>(tile_rows(group_));
    for (int32_t row = 0; row < segment_.n_rows; row += tile) {
      attend(row, std::min(tile, segment_.n_rows - row));
    }
    if (fits_) {
      select_next_slot(kernels_, head_, segment_, work_.logits);
    } else {
      admit_chunk(cache_, head_, chunk_, segment_, work_.victims);
    }
  }

 private:
  // Where attention reads its keys: as they are stored, or rotated.
  struct Keys {
    const TypeKernels* kernels;
    const std::byte* slots;
    const std::byte* chunk;
    int64_t row_bytes;
  };

  // All keys that some row attends to: none of the dead row at next_slot of a filled pool.
  using Visible = std::array<KvRows, 3>;

  Keys where_keys_are() const {
    if (!segment_.rolling) return {&k_kernels_, head_.k, chunk_.k, cache_.k_row_bytes};
    const float* chunk = work_.rotated + int64_t{head_.slots} * cache_.head_dim;
    return {&kernels_.f32, reinterpret_cast<const std::byte*>(work_.rotated),
            reinterpret_cast<const std::byte*>(chunk), cache_.head_dim * int64_t{sizeof(float)}};
  }

  KvRows slots(int64_t begin, int64_t end) const {
    const KvRow row = slot_row(cache_, head_, begin);
    return {keys_.slots + begin * keys_.row_bytes,
            row.v,
            row.score,
            head_.positions + begin,
            0,
            end - begin};
  }
  KvRows chunk_rows(int64_t begin, int64_t end) const {
    const KvRow row = chunk_row(cache_, head_, chunk_, begin);
    const int32_t first = segment_.position + static_cast<int32_t>(begin);
    return {keys_.chunk + begin * keys_.row_bytes, row.v, row.score, nullptr, first, end - begin};
  }

  // What was there before the segment's first row, and its rows [0, row].
  Visible visible(int32_t row) const {
    if (fits_) return {slots(0, kept_ + row + 1)};
    const int32_t dead = std::min(first_, written_);
    return {slots(0, dead), slots(std::min(dead + 1, written_), written_), chunk_rows(0, row + 1)};
  }
  // Rows [begin, end) of the segment.
  KvRows own(int32_t begin, int32_t end) const {
    return fits_ ? slots(kept_ + begin, kept_ + end) : chunk_rows(begin, end);
  }

  // Rounds the new row to the cache's types, which attention then reads.
  void store(int32_t row, const KvRow& to) const {
    const int64_t column = int64_t{kv_head_} * cache_.head_dim;
    const float* k = attention_.k.floats() + (segment_.row + row) * attention_.k.cols + column;
    const float* v = attention_.v.floats() + (segment_.row + row) * attention_.v.cols + column;
    k_kernels_.encode(to.k, k, cache_.head_dim);
    v_kernels_.encode(to.v, v, cache_.head_dim);
    if (to.score != nullptr) *to.score = 0.0f;
    if (to.value_norm != nullptr) *to.value_norm = value_norm(v, cache_.head_dim);
  }

  // `slot` now holds the segment's token `row`.
  void enter(int32_t slot, int32_t row) const {
    head_.positions[slot] = segment_.position + row;
    if (segment_.rolling) head_.ranks[slot] = kept_ + row;
  }

  // All keys that a row may attend to, rotated by their ranks.
  void rotate_keys() const {
    const auto rotate_key = [this](int64_t to, const std::byte* k, int64_t rank) {
      float* key = work_.rotated + to * cache_.head_dim;
      k_kernels_.decode(key, k, cache_.head_dim);
      h2o::rotate(kernels_, key, cache_.rope_table + rank * attention_.rope.n_rot(),
                  attention_.rope);
    };
    const int32_t used = fits_ ? kept_ + segment_.n_rows : written_;
    for (int32_t i = 0; i < used; ++i) {
      const bool dead = !fits_ && i == first_;
      if (!dead) rotate_key(i, slot_row(cache_, head_, i).k, head_.ranks[i]);
    }
    for (int32_t row = 0; !fits_ && row < segment_.n_rows; ++row) {
      rotate_key(head_.slots + row, chunk_row(cache_, head_, chunk_, row).k, kept_ + row);
    }
  }

  float* row_of(const Tensor& x, int32_t row) const {
    const int64_t column = int64_t{kv_head_} * group_ * cache_.head_dim;
    return x.floats() + (segment_.row + row) * x.cols + column;
  }

  // Rows [first, first + n), all heads of the group: softmax over the keys visible to each row,
  // output, scores. The sums of a row run in the order of its keys, whatever the tile.
  void attend(int32_t first, int32_t n) const {
    const int64_t width = group_ * cache_.head_dim;
    for (int32_t i = 0; i < n; ++i) {
      std::copy_n(row_of(attention_.q, first + i), width, work_.q + i * width);
    }
    std::fill_n(work_.out, n * width, 0.0f);

    float* logits = work_.logits;
    for (const KvRows& keys : visible(first + n - 1)) {  // more than the earlier rows may see
      multiply(keys, n * group_, logits);
      logits += keys.n;
    }
    for (int32_t i = 0; i < n; ++i) weigh(first, i);

    const Visible common = visible(first);
    const float* p = work_.logits;
    for (const KvRows& values : common) {
      add_values(values, n * group_, p, work_.out);
      p += values.n;
    }
    for (int32_t i = 1; i < n; ++i) {  // and each row's keys after those
      add_values(own(first + 1, first + i + 1), group_, p + i * group_ * work_.stride,
                 work_.out + i * width);
    }
    for (int32_t i = 0; i < n; ++i) {
      std::copy_n(work_.out + i * width, width, row_of(attention_.out, first + i));
    }
  }

  // logits [n_queries, keys.n] = q keys^T
  void multiply(const KvRows& keys, int64_t n_queries, float* logits) const {
    keys_.kernels->matmul({.y = logits,
                           .x = work_.q,
                           .w = keys.k,
                           .bias = nullptr,
                           .n_rows = n_queries,
                           .n_in = cache_.head_dim,
                           .w_row_bytes = keys_.row_bytes,
                           .y_stride = work_.stride,
                           .add = false},
                          0, keys.n);
  }

  // Row first + i of the tile: logits become probabilities, which are added to the scores.
  void weigh(int32_t first, int32_t i) const {
    const Visible keys = visible(first + i);
    int64_t n_visible = 0;
    for (const KvRows& part : keys) {
      n_visible += part.n;
      if (part.scores != nullptr && head_.policy.decay != 1) {
        kernels_.scale(part.scores, part.n, head_.policy.decay);
      }
    }
    for (int64_t h = 0; h < group_; ++h) {
      float* p = work_.logits + (i * group_ + h) * work_.stride;
      const bool masked = attention_.window > 0 && segment_.n_rows > 1;
      if (masked) beyond_window(keys, first + i, p, -std::numeric_limits<float>::infinity());
      kernels_.softmax(p, n_visible, attention_.scale);
      if (masked) beyond_window(keys, first + i, p, 0);  // and not only very small
      for (const KvRows& part : keys) {
        if (part.scores != nullptr) kernels_.add(part.scores, p, part.n);
        p += part.n;
      }
    }
  }

  // Sets the elements of p [keys] that are of tokens too old for a row to see. Where a segment is
  // one row the cache keeps none of them.
  void beyond_window(const Visible& keys, int32_t row, float* p, float value) const {
    const int32_t oldest = segment_.position + row - attention_.window + 1;
    for (const KvRows& part : keys) {
      for (int64_t i = 0; i < part.n; ++i) {
        if (part.position(i) < oldest) p[i] = value;
      }
      p += part.n;
    }
  }

  // out [n_queries, head_dim] += p [n_queries, values.n] values
  void add_values(const KvRows& values, int64_t n_queries, const float* p, float* out) const {
    v_kernels_.add_rows({.y = out,
                         .p = p,
                         .rows = values.v,
                         .n_out = n_queries,
                         .n_rows = values.n,
                         .n = cache_.head_dim,
                         .row_bytes = cache_.v_row_bytes,
                         .p_stride = work_.stride});
  }

  const CpuKernels& kernels_;
  const TypeKernels& k_kernels_;
  const TypeKernels& v_kernels_;
  const Attention& attention_;
  const KvView& cache_;
  const Segment& segment_;
  const int32_t kv_head_;
  const KvHead head_;
  const KvStaging chunk_;
  const int64_t group_;    // query heads that share this kv_head
  const int32_t kept_;     // tokens of the sequence in the cache
  const int32_t written_;  // slots that hold one, or are dead
  const int32_t first_;    // slot of the first new row, if it fits
  const bool fits_;        // do the new rows fit in free slots?
  const Workspace work_;
  const Keys keys_;
};

}  // namespace

size_t attend_head_workspace(const KvView& shape) { return Workspace(shape).bytes; }

void attend_head(const CpuKernels& kernels, const Attention& attention, const KvView& cache,
                 const Segment& segment, int32_t kv_head, std::byte* workspace) {
  HeadStep(kernels, attention, cache, segment, kv_head, workspace).run();
}

}  // namespace h2o
