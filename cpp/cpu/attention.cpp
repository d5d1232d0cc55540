#include "cpu/attention.h"

#include <algorithm>
#include <array>
#include <span>

namespace h2o {
namespace {

// Consecutive rows of keys and values, in slots or in the chunk that is waiting for slots.
struct KvRows {
  const std::byte* k;
  const std::byte* v;
  float* scores;  // nullptr when the policy keeps none
  int64_t n;
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
        kept_(static_cast<int32_t>(std::min<int64_t>(segment.position, cache.policy.budget()))),
        first_(*head_.next_slot),
        logits_(reinterpret_cast<float*>(workspace)),
        logits_stride_(int64_t{cache.slots} + cache.max_rows),
        victims_(reinterpret_cast<Victim*>(logits_ + group_ * logits_stride_)) {}

  void run() {
    // New rows that fit go straight to their slots; otherwise they wait in the chunk, because
    // nothing is evicted before every row of the segment has attended.
    const bool fits = int64_t{kept_} + segment_.n_rows <= cache_.slots;
    for (int32_t row = 0; row < segment_.n_rows; ++row) {
      if (fits) {
        store(row, slot(first_ + row));
        enter(first_ + row, row, 0.0f);
      } else {
        store(row, chunk_row(row));
      }
    }
    for (int32_t row = 0; row < segment_.n_rows; ++row) {
      if (fits) {
        attend(row, std::array{slots(0, kept_ + row + 1)});
      } else {
        // In a filled pool the row at next_slot is dead.
        const int32_t written = std::min(segment_.position, cache_.slots);
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
    float* score;
  };

  KvRow slot(int64_t i) const {
    return {head_.k + i * cache_.k_row_bytes, head_.v + i * cache_.v_row_bytes,
            head_.scores != nullptr ? head_.scores + i : nullptr};
  }
  KvRow chunk_row(int64_t i) const {
    return {chunk_.k + i * cache_.k_row_bytes, chunk_.v + i * cache_.v_row_bytes,
            chunk_.scores + i};
  }
  KvRows slots(int64_t begin, int64_t end) const {
    const KvRow row = slot(begin);
    return {row.k, row.v, row.score, end - begin};
  }
  KvRows chunk_rows(int64_t n) const {
    return {chunk_.k, chunk_.v, head_.scores != nullptr ? chunk_.scores : nullptr, n};
  }

  // Rounds the new row to the cache's types, which attention then reads.
  void store(int32_t row, const KvRow& to) const {
    const int64_t column = int64_t{kv_head_} * cache_.head_dim;
    const float* k = attention_.k.floats() + (segment_.row + row) * attention_.k.cols + column;
    const float* v = attention_.v.floats() + (segment_.row + row) * attention_.v.cols + column;
    k_kernels_.encode(to.k, k, cache_.head_dim);
    v_kernels_.encode(to.v, v, cache_.head_dim);
    if (to.score != nullptr) *to.score = 0.0f;
  }

  // `slot` now holds the segment's token `row`.
  void enter(int32_t slot, int32_t row, float score) const {
    head_.positions[slot] = segment_.position + row;
    if (head_.scores != nullptr) head_.scores[slot] = score;
  }

  // Query `row`, all heads of the group: softmax over the visible keys, output, scores.
  void attend(int32_t row, std::span<const KvRows> visible) const {
    const int64_t head_dim = cache_.head_dim;
    const int64_t column = int64_t{kv_head_} * group_ * head_dim;
    const float* q = attention_.q.floats() + (segment_.row + row) * attention_.q.cols + column;
    float* out = attention_.out.floats() + (segment_.row + row) * attention_.out.cols + column;

    int64_t n_visible = 0;
    for (const KvRows& keys : visible) {
      k_kernels_.matmul({.y = logits_ + n_visible,
                         .x = q,
                         .w = keys.k,
                         .bias = nullptr,
                         .n_rows = group_,
                         .n_in = head_dim,
                         .w_row_bytes = cache_.k_row_bytes,
                         .y_stride = logits_stride_,
                         .add = false},
                        0, keys.n);
      n_visible += keys.n;
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

  float score(int32_t slot) const { return head_.scores != nullptr ? head_.scores[slot] : 0.0f; }

  // The slot of the next token: a free one, or that of the token to evict.
  void choose() const {
    const int32_t next = segment_.position + segment_.n_rows;
    const int32_t used = kept_ + segment_.n_rows;
    if (!cache_.evicts() || used < cache_.slots) {
      *head_.next_slot = used;
      return;
    }
    Victim victim{0, 0, -1};
    for (int32_t slot = 0; slot < used; ++slot) {
      const int32_t position = head_.positions[slot];
      if (!cache_.policy.evictable(position, next)) continue;
      const Victim candidate{score(slot), position, slot};
      if (victim.slot < 0 || candidate.before(victim)) victim = candidate;
    }
    *head_.next_slot = victim.slot;
  }

  // Keeps `budget` of the cached tokens and the chunk; the chunk's survivors move into the slots
  // of the evicted. Victim::slot counts on into the chunk: slots + row.
  void admit() const {
    const int32_t next = segment_.position + segment_.n_rows;
    const int32_t written = std::min(segment_.position, cache_.slots);
    const bool filled = written == cache_.slots;

    int64_t n = 0;
    for (int32_t slot = 0; slot < written; ++slot) {
      const int32_t position = head_.positions[slot];
      if (filled && slot == first_) continue;  // the dead row
      if (cache_.policy.evictable(position, next)) victims_[n++] = {score(slot), position, slot};
    }
    for (int32_t row = 0; row < segment_.n_rows; ++row) {
      const int32_t position = segment_.position + row;
      if (!cache_.policy.evictable(position, next)) continue;
      const float score = head_.scores != nullptr ? chunk_.scores[row] : 0.0f;
      victims_[n++] = {score, position, cache_.slots + row};
    }
    const int64_t n_evicted = int64_t{kept_} + segment_.n_rows - cache_.policy.budget();
    std::nth_element(victims_, victims_ + n_evicted, victims_ + n,
                     [](const Victim& a, const Victim& b) { return a.before(b); });
    std::sort(victims_, victims_ + n_evicted,
              [](const Victim& a, const Victim& b) { return a.slot < b.slot; });

    // Free slots, in order: those of evicted tokens, then the ones that held none before.
    const Victim* evicted = victims_;
    const Victim* const evicted_end = victims_ + n_evicted;
    int32_t unused = first_;
    const auto take_free_slot = [&] {
      if (evicted != evicted_end && evicted->slot < cache_.slots) return (evicted++)->slot;
      return unused++;
    };
    const Victim* evicted_row = std::partition_point(
        evicted, evicted_end, [this](const Victim& v) { return v.slot < cache_.slots; });
    for (int32_t row = 0; row < segment_.n_rows; ++row) {
      if (evicted_row != evicted_end && evicted_row->slot == cache_.slots + row) {
        ++evicted_row;
        continue;
      }
      const int32_t to = take_free_slot();
      std::copy_n(chunk_row(row).k, cache_.k_row_bytes, slot(to).k);
      std::copy_n(chunk_row(row).v, cache_.v_row_bytes, slot(to).v);
      enter(to, row, chunk_.scores[row]);
    }
    *head_.next_slot = take_free_slot();  // slots = budget + 1: exactly one is left
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
};

}  // namespace

size_t attend_head_workspace(const KvView& shape) {
  const size_t group = shape.n_heads / shape.n_kv_heads;
  const size_t keys = size_t{1} * shape.slots + shape.max_rows;
  return keys * (group * sizeof(float) + sizeof(Victim));
}

void attend_head(const CpuKernels& kernels, const Attention& attention, const KvView& cache,
                 const Segment& segment, int32_t kv_head, std::byte* workspace) {
  HeadStep(kernels, attention, cache, segment, kv_head, workspace).run();
}

}  // namespace h2o
