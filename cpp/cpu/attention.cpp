#include "cpu/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

#include "cpu/rotate.h"

namespace h2o {
namespace {

// Consecutive rows of keys and values, in slots or in the chunk that is waiting for slots.
struct KvRows {
  const std::byte* k;
  const std::byte* v;
  float* scores;  // nullptr when the policy keeps none
  int64_t n;
};

// |v|_1 in f32, in order; finite whatever v is, so that worths have an order.
float value_norm(const float* v, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += std::abs(v[i]);
  constexpr float kLargest = std::numeric_limits<float>::max();
  return sum < kLargest ? sum : kLargest;
}

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
        first_(*head_.next_slot),
        logits_(reinterpret_cast<float*>(workspace)),
        logits_stride_(int64_t{cache.slots} + cache.max_rows),
        victims_(reinterpret_cast<Victim*>(logits_ + group_ * logits_stride_)),
        rotated_(reinterpret_cast<float*>(victims_ + logits_stride_)),
        keys_(segment.rolling ? Keys{&kernels.f32, reinterpret_cast<std::byte*>(rotated_),
                                     reinterpret_cast<std::byte*>(rotated_ + int64_t{head_.slots} *
                                                                                 cache.head_dim),
                                     int64_t{sizeof(float)} * cache.head_dim}
                              : Keys{&k_kernels_, head_.k, chunk_.k, cache.k_row_bytes}) {}

  void run() {
    // New rows that fit go straight to their slots; otherwise they wait in the chunk, because
    // nothing is evicted before every row of the segment has attended.
    const bool fits = int64_t{kept_} + segment_.n_rows <= head_.slots;
    for (int32_t row = 0; row < segment_.n_rows; ++row) {
      if (fits) {
        store(row, slot(first_ + row));
        enter(first_ + row, row);
      } else {
        store(row, chunk_row(row));
      }
    }
    if (segment_.rolling) rotate_keys(fits);
    for (int32_t row = 0; row < segment_.n_rows; ++row) {
      if (fits) {
        attend(row, std::array{slots(0, kept_ + row + 1)});
      } else {
        // In a filled pool the row at next_slot is dead.
        const int32_t written = std::min(segment_.position, head_.slots);
        const int32_t dead = std::min(first_, written);
        attend(row, std::array{slots(0, dead), slots(std::min(dead + 1, written), written),
                               chunk_rows(row + 1)});
      }
    }
    if (fits) {
      choose();
    } else {
      admit();
    }
  }

 private:
  struct KvRow {
    std::byte* k;
    std::byte* v;
    float* score;  // nullptr when the policy keeps none
    float* value_norm;
  };

  // Where attention reads its keys.
  struct Keys {
    const TypeKernels* kernels;
    const std::byte* slots;
    const std::byte* chunk;
    int64_t row_bytes;
  };

  static float* at(float* array, int64_t i) { return array != nullptr ? array + i : nullptr; }

  KvRow slot(int64_t i) const {
    return {head_.k + i * cache_.k_row_bytes, head_.v + i * cache_.v_row_bytes, at(head_.scores, i),
            at(head_.value_norms, i)};
  }
  KvRow chunk_row(int64_t i) const {
    return {chunk_.k + i * cache_.k_row_bytes, chunk_.v + i * cache_.v_row_bytes,
            head_.scores != nullptr ? chunk_.scores + i : nullptr,
            head_.value_norms != nullptr ? chunk_.value_norms + i : nullptr};
  }
  KvRows slots(int64_t begin, int64_t end) const {
    const KvRow row = slot(begin);
    return {keys_.slots + begin * keys_.row_bytes, row.v, row.score, end - begin};
  }
  KvRows chunk_rows(int64_t n) const {
    const KvRow row = chunk_row(0);
    return {keys_.chunk, row.v, row.score, n};
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
  void rotate_keys(bool fits) const {
    const auto rotate = [this](int64_t to, const std::byte* k, int64_t rank) {
      float* key = rotated_ + to * cache_.head_dim;
      k_kernels_.decode(key, k, cache_.head_dim);
      turn(kernels_, key, cache_.turns + rank * attention_.rope.n_rot(), attention_.rope);
    };
    const int32_t used = fits ? kept_ + segment_.n_rows : std::min(segment_.position, head_.slots);
    for (int32_t i = 0; i < used; ++i) rotate(i, slot(i).k, head_.ranks[i]);
    if (fits) return;
    for (int32_t row = 0; row < segment_.n_rows; ++row) {
      rotate(head_.slots + row, chunk_row(row).k, kept_ + row);
    }
  }

  // Query `row`, all heads of the group: softmax over the visible keys, output, scores.
  void attend(int32_t row, std::span<const KvRows> visible) const {
    const int64_t head_dim = cache_.head_dim;
    const int64_t column = int64_t{kv_head_} * group_ * head_dim;
    const float* q = attention_.q.floats() + (segment_.row + row) * attention_.q.cols + column;
    float* out = attention_.out.floats() + (segment_.row + row) * attention_.out.cols + column;

    int64_t n_visible = 0;
    for (const KvRows& keys : visible) {
      keys_.kernels->matmul({.y = logits_ + n_visible,
                             .x = q,
                             .w = keys.k,
                             .bias = nullptr,
                             .n_rows = group_,
                             .n_in = head_dim,
                             .w_row_bytes = keys_.row_bytes,
                             .y_stride = logits_stride_,
                             .add = false},
                            0, keys.n);
      n_visible += keys.n;
      if (keys.scores != nullptr && head_.policy.decay != 1) {
        kernels_.scale(keys.scores, keys.n, head_.policy.decay);
      }
    }
    std::fill_n(out, group_ * head_dim, 0.0f);
    for (int64_t h = 0; h < group_; ++h) {
      float* p = logits_ + h * logits_stride_;
      kernels_.softmax(p, n_visible, attention_.scale);
      for (const KvRows& values : visible) {
        v_kernels_.add_rows(out + h * head_dim, p, values.v, values.n, head_dim,
                            cache_.v_row_bytes);
        if (values.scores != nullptr) kernels_.add(values.scores, p, values.n);
        p += values.n;
      }
    }
  }

  // What the token at `position` in `row` may be evicted for, when the next one is at `next`.
  Victim victim(const KvRow& row, int32_t position, int32_t next, int32_t slot) const {
    const float score = row.score != nullptr ? *row.score : 0.0f;
    const float norm = row.value_norm != nullptr ? *row.value_norm : 1.0f;
    return {head_.policy.worth(score, norm, position, next), position, slot};
  }

  // The slot of the next token: a free one, or that of the token to evict.
  void choose() const {
    const int32_t next = segment_.position + segment_.n_rows;
    const int32_t used = kept_ + segment_.n_rows;
    if (!head_.evicts() || used < head_.slots) {
      *head_.next_slot = used;
      return;
    }
    Victim first{0, 0, -1};
    for (int32_t i = 0; i < used; ++i) {
      const int32_t position = head_.positions[i];
      if (!head_.policy.evictable(position, next)) continue;
      const Victim candidate = victim(slot(i), position, next, i);
      if (first.slot < 0 || candidate.before(first)) first = candidate;
    }
    *head_.next_slot = first.slot;
    if (segment_.rolling) close_rank(first.slot, used);
  }

  // Younger tokens move up by one when the one in `slot` goes.
  void close_rank(int32_t slot, int32_t used) const {
    const int32_t rank = head_.ranks[slot];
    for (int32_t i = 0; i < used; ++i) head_.ranks[i] -= head_.ranks[i] > rank;
  }

  // Keeps `budget` of the cached tokens and the chunk; the chunk's survivors move into the slots
  // of the evicted. Victim::slot counts on into the chunk: slots + row.
  void admit() const {
    const int32_t next = segment_.position + segment_.n_rows;
    const int32_t written = std::min(segment_.position, head_.slots);
    const bool filled = written == head_.slots;

    int64_t n = 0;
    for (int32_t i = 0; i < written; ++i) {
      const int32_t position = head_.positions[i];
      if (filled && i == first_) continue;  // the dead row
      if (head_.policy.evictable(position, next))
        victims_[n++] = victim(slot(i), position, next, i);
    }
    for (int32_t row = 0; row < segment_.n_rows; ++row) {
      const int32_t position = segment_.position + row;
      if (!head_.policy.evictable(position, next)) continue;
      victims_[n++] = victim(chunk_row(row), position, next, head_.slots + row);
    }
    const int64_t n_evicted = int64_t{kept_} + segment_.n_rows - head_.policy.budget();
    std::nth_element(victims_, victims_ + n_evicted, victims_ + n,
                     [](const Victim& a, const Victim& b) { return a.before(b); });
    std::sort(victims_, victims_ + n_evicted,
              [](const Victim& a, const Victim& b) { return a.slot < b.slot; });

    // Free slots, in order: those of evicted tokens, then the ones that held none before.
    const Victim* evicted = victims_;
    const Victim* const evicted_end = victims_ + n_evicted;
    int32_t unused = first_;
    const auto take_free_slot = [&] {
      if (evicted != evicted_end && evicted->slot < head_.slots) return (evicted++)->slot;
      return unused++;
    };
    const Victim* evicted_row = std::partition_point(
        evicted, evicted_end, [this](const Victim& v) { return v.slot < head_.slots; });
    for (int32_t row = 0; row < segment_.n_rows; ++row) {
      if (evicted_row != evicted_end && evicted_row->slot == head_.slots + row) {
        ++evicted_row;
        continue;
      }
      const int32_t to = take_free_slot();
      move(chunk_row(row), slot(to));
      enter(to, row);
    }
    *head_.next_slot = take_free_slot();  // slots = budget + 1: exactly one is left
    if (segment_.rolling) {
      rank_slots(head_, head_.slots, *head_.next_slot, reinterpret_cast<int32_t*>(victims_));
    }
  }

  void move(const KvRow& from, const KvRow& to) const {
    std::copy_n(from.k, cache_.k_row_bytes, to.k);
    std::copy_n(from.v, cache_.v_row_bytes, to.v);
    if (to.score != nullptr) *to.score = *from.score;
    if (to.value_norm != nullptr) *to.value_norm = *from.value_norm;
  }

  const CpuKernels& kernels_;
  const TypeKernels& k_kernels_;
  const TypeKernels& v_kernels_;
  const Attention& attention_;
  const KvView& cache_;
  const Segment& segment_;
  const int32_t kv_head_;
  const KvHead head_;
  const KvChunk chunk_;
  const int64_t group_;  // query heads that share this kv_head
  const int32_t kept_;   // tokens of the sequence in the cache
  const int32_t first_;  // slot of the first new row, if it fits
  float* const logits_;  // [group, logits_stride]
  const int64_t logits_stride_;
  Victim* const victims_;  // [slots + max_rows]
  float* const rotated_;   // [slots + max_rows, head_dim] keys of a rolling segment
  const Keys keys_;
};

}  // namespace

size_t attend_head_workspace(const KvView& shape) {
  const size_t group = shape.n_heads / shape.n_kv_heads;
  const size_t keys = size_t{1} * shape.slots + shape.max_rows;
  const size_t rotated = shape.ranks != nullptr ? shape.head_dim * sizeof(float) : 0;
  const size_t turns = shape.head_dim * sizeof(float);  // of one position, for the new rows
  return std::max(turns, keys * (group * sizeof(float) + sizeof(Victim) + rotated));
}

void attend_head(const CpuKernels& kernels, const Attention& attention, const KvView& cache,
                 const Segment& segment, int32_t kv_head, std::byte* workspace) {
  HeadStep(kernels, attention, cache, segment, kv_head, workspace).run();
}

}  // namespace h2o
