#include "cpu/attention/tile.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/attention/rotate.h"

namespace h2o {
namespace {

constexpr int64_t kTogether = 32;  // queries per call of merge_sums or weights_of

}  // namespace

void merge_sums(const CpuKernels& kernels, const Attention& attention, int64_t head_dim,
                const TileSums& part, const TileSums& to, int64_t begin, int64_t end) {
  float keep[kTogether];
  float take[kTogether];
  for (; begin < end; begin += kTogether) {
    const int64_t n = std::min(end - begin, kTogether);
    kernels.merge_sums({to.softmax.largest + begin, to.softmax.total + begin},
                       {part.softmax.largest + begin, part.softmax.total + begin}, keep, take, n,
                       attention.scale);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = (begin + i) * head_dim;
      kernels.mix(to.out + at, part.out + at, head_dim, keep[i], take[i]);
    }
  }
}

bool may_round(const CpuKernels& kernels, const KvView& cache) {
  return kernels.of(cache.k_dtype).bf16_attention != nullptr &&
         kernels.of(cache.v_dtype).bf16_attention != nullptr && cache.head_dim % 32 == 0 &&
         cache.head_dim <= kMostHeadDim;
}

Tile::Tile(const CpuKernels& kernels, const Attention& attention, const SegmentHead& keys,
           int64_t first, int64_t n)
    : kernels_(kernels),
      attention_(attention),
      keys_(keys),
      cache_(keys.cache()),
      k_kernels_(kernels.of(cache_.k_dtype)),
      v_kernels_(kernels.of(cache_.v_dtype)),
      first_(first),
      n_(n),
      group_(cache_.n_heads / cache_.n_kv_heads),
      in_bf16_(attention.allow_bf16 && may_round(kernels, cache_)) {}

float* Tile::row_of(const Tensor& x, int64_t i) const {
  const int64_t column = keys_.kv_head() * group_ * cache_.head_dim;
  return x.floats() + (keys_.segment().row + first_ + i) * x.cols + column;
}

void Tile::load_queries(const TileScratch& scratch) const {
  const int64_t width = group_ * cache_.head_dim;
  for (int64_t i = 0; i < n_; ++i) {
    const float* q = row_of(attention_.q, i);
    if (rounds_logits()) {
      kernels_.round_rows({scratch.rounded_q + i * width, group_, cache_.head_dim}, q, 0, group_);
    } else {
      std::copy_n(q, width, scratch.q + i * width);
    }
  }
}

void Tile::attend(int64_t block, const TileScratch& scratch, float* exps, const TileSums& to,
                  int64_t begin, int64_t end) const {
  const int64_t row = first_row(block);
  begin = std::max(begin, row * group_);
  if (begin >= end) return;
  if (splits(kernels_, cache_)) {
    return attend_split(block, scratch, exps, to, begin, end);
  }
  multiply(block, scratch, exps, begin, end);
  for (int64_t i = begin; i < end; ++i) exponentiate(block, i, exps + i * kExpsStride, to.softmax);

  // First the keys visible to all rows, then for each later row the additional ones.
  const int64_t head_dim = cache_.head_dim;
  const int64_t key = block * kKeyBlock;
  const int64_t together = in_bf16_ ? 2 : 1;  // see Bf16Attention::add_values
  const int64_t common = n_keys(block, row) / together * together;
  std::fill(to.out + begin * head_dim, to.out + end * head_dim, 0.0f);
  add_values(key, key + common, end - begin, exps + begin * kExpsStride, to.out + begin * head_dim);
  for (int64_t i = row; i < n_; ++i) {
    const int64_t query = std::max(begin, i * group_);
    const int64_t n = std::min(end, (i + 1) * group_) - query;
    if (n <= 0 || n_keys(block, i) == common) continue;
    add_values(key + common, key + n_keys(block, i), n, exps + query * kExpsStride + common,
               to.out + query * head_dim);
  }
}

// Logits to exponentials, for query i.
void Tile::exponentiate(int64_t block, int64_t i, float* exps, const SoftmaxSums& to) const {
  const int64_t n = n_keys(block, i / group_);
  if (attention_.slopes) add_distances(block, i, exps);
  if (attention_.softcap > 0) {  // logits are scaled later
    kernels_.softcap(exps, n, attention_.softcap / attention_.scale);
  }
  if (windowed()) return exps_in_window(block, i, exps, to);
  to.total[i] = kernels_.exponentiate(exps, n, attention_.scale, to.largest + i);
}

// logits [queries, kExpsStride] = q keys^T for queries [begin, end), including keys not visible to
// earlier rows.
void Tile::multiply(int64_t block, const TileScratch& scratch, float* logits, int64_t begin,
                    int64_t end) const {
  const int64_t key = block * kKeyBlock;
  const SegmentHead::Parts parts = keys_.keys(key, key + n_keys(block, n_ - 1));
  float* y = logits + begin * kExpsStride;
  const auto dots = [&](const TypeKernels& type, const std::byte* k, int64_t k_bytes, int64_t n) {
    const Matmul m{.y = y,
                   .x = scratch.q + begin * cache_.head_dim,
                   .w = k,
                   .bias = nullptr,
                   .n_rows = end - begin,
                   .n_in = cache_.head_dim,
                   .w_row_bytes = k_bytes,
                   .y_stride = kExpsStride,
                   .add = false};
    if (rounds_logits()) {
      const Bf16Rows x{scratch.rounded_q + begin * cache_.head_dim, end - begin, cache_.head_dim};
      type.bf16_attention->multiply_keys(m, x, n);
    } else {
      type.matmul(m, 0, n);
    }
    y += n;
  };
  if (keys_.segment().rolling) {
    rotate_keys(parts, scratch.rotated);
    dots(kernels_.f32, reinterpret_cast<const std::byte*>(scratch.rotated),
         cache_.head_dim * int64_t{sizeof(float)}, n_keys(block, n_ - 1));
  } else {
    for (const KvRows& part : parts) dots(k_kernels_, part.k, cache_.k_row_bytes, part.n);
  }
}

// ALiBi, applied to unscaled logits. With rolling positions, distances are differences of ranks.
void Tile::add_distances(int64_t block, int64_t i, float* logits) const {
  const float slope = attention_.slopes.floats()[head_of(i)] / attention_.scale;
  const Segment& segment = keys_.segment();
  const bool rolling = segment.rolling;
  const int64_t row = i / group_;
  const int64_t before = rolling ? keys_.head().policy.kept(segment.position) : segment.position;
  const int64_t begin = block * kKeyBlock;
  for (const KvRows& part : keys_.keys(begin, begin + n_keys(block, row))) {
    for (int64_t k = 0; k < part.n; ++k) {
      const int64_t at = rolling ? part.rank(k) : part.position(k);
      logits[k] -= slope * static_cast<float>(before + first_ + row - at);
    }
    logits += part.n;
  }
}

// The exponentials of query i, with 0 for keys outside its window.
void Tile::exps_in_window(int64_t block, int64_t i, float* exps, const SoftmaxSums& to) const {
  const int64_t row = i / group_;
  const int64_t n = n_keys(block, row);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  // no visible keys: sums as at the start
  if (set_beyond_window(block, row, exps, -kInfinity) == n) {
    to.largest[i] = -std::numeric_limits<float>::max();
    to.total[i] = 0;
  } else {
    to.total[i] = kernels_.exponentiate(exps, n, attention_.scale, to.largest + i);
  }
  set_beyond_window(block, row, exps, 0);  // exactly zero
}

// Sets the elements of p [keys of the block] of tokens outside a row's window; returns their
// number.
int64_t Tile::set_beyond_window(int64_t block, int64_t row, float* p, float value) const {
  const int64_t position = keys_.segment().position + first_ + row;
  const int64_t oldest = attention_.in_blocks ? position - position % attention_.window
                                              : position - attention_.window + 1;
  const int64_t begin = block * kKeyBlock;
  int64_t n_old = 0;
  for (const KvRows& part : keys_.keys(begin, begin + n_keys(block, row))) {
    for (int64_t i = 0; i < part.n; ++i) {
      if (part.position(i) >= oldest) continue;
      p[i] = value;
      ++n_old;
    }
    p += part.n;
  }
  return n_old;
}

// Rotates keys by their ranks.
void Tile::rotate_keys(const SegmentHead::Parts& parts, float* rotated) const {
  for (const KvRows& part : parts) {
    for (int64_t i = 0; i < part.n; ++i, rotated += cache_.head_dim) {
      k_kernels_.decode(rotated, part.k + i * cache_.k_row_bytes, cache_.head_dim);
      rotate(kernels_, rotated, cache_.rope_table + part.rank(i) * attention_.rope.n_rot(),
             attention_.rope);
    }
  }
}

// out [n_queries, head_dim] += exps [n_queries, end - begin] values
void Tile::add_values(int64_t begin, int64_t end, int64_t n_queries, const float* exps,
                      float* out) const {
  if (in_bf16_) {
    const std::byte* rows[kKeyBlock];
    int64_t n = 0;
    for (const KvRows& part : keys_.keys(begin, end)) {
      for (int64_t i = 0; i < part.n; ++i) rows[n++] = part.v + i * cache_.v_row_bytes;
    }
    return v_kernels_.bf16_attention->add_values({.y = out,
                                                  .p = exps,
                                                  .rows = rows,
                                                  .n_out = n_queries,
                                                  .n_rows = n,
                                                  .n = cache_.head_dim,
                                                  .p_stride = kExpsStride});
  }
  for (const KvRows& part : keys_.keys(begin, end)) {
    v_kernels_.add_rows({.y = out,
                         .p = exps,
                         .rows = part.v,
                         .n_out = n_queries,
                         .n_rows = part.n,
                         .n = cache_.head_dim,
                         .row_bytes = cache_.v_row_bytes,
                         .p_stride = kExpsStride});
    exps += part.n;
  }
}

void Tile::start(const TileSums& sums, int64_t begin, int64_t end) const {
  constexpr float kMax = std::numeric_limits<float>::max();
  std::fill(sums.softmax.largest + begin, sums.softmax.largest + end, -kMax);
  std::fill(sums.softmax.total + begin, sums.softmax.total + end, 0.0f);
  for (int64_t i = begin; attention_.sinks && i < end;
       ++i) {  // a power that no value is multiplied by
    const float logit = attention_.sinks.floats()[head_of(i)] / attention_.scale;
    sums.softmax.largest[i] = logit > -kMax ? std::min(logit, kMax) : -kMax;  // NaN: -kMax
    sums.softmax.total[i] = 1;
  }
  std::fill(sums.out + begin * cache_.head_dim, sums.out + end * cache_.head_dim, 0.0f);
}

void Tile::merge(int64_t block, const TileSums& part, const TileSums& to, int64_t begin,
                 int64_t end) const {
  merge(part, to, std::max(begin, first_row(block) * group_), end);
}

void Tile::merge(const TileSums& part, const TileSums& to, int64_t begin, int64_t end) const {
  merge_sums(kernels_, attention_, cache_.head_dim, part, to, begin, end);
}

void Tile::write(const TileSums& sums, int64_t begin, int64_t end) const {
  const int64_t head_dim = cache_.head_dim;
  for (int64_t i = begin; i < end; ++i) {
    float* out = row_of(attention_.out, i / group_) + i % group_ * head_dim;
    std::copy_n(sums.out + i * head_dim, head_dim, out);
    kernels_.scale(out, head_dim, 1 / sums.softmax.total[i]);
  }
}

void Tile::weigh(int64_t block, const float* largest, const SoftmaxSums& all, float* exps) const {
  float weights[kTogether];
  for (int64_t begin = first_row(block) * group_; begin < n_queries(); begin += kTogether) {
    const int64_t end = std::min(begin + kTogether, n_queries());
    kernels_.weights_of(weights, largest + begin, {all.largest + begin, all.total + begin},
                        end - begin, attention_.scale);
    for (int64_t query = begin; query < end; ++query) {
      float* const power = exps + query * kExpsStride;
      const int64_t n = n_keys(block, query / group_);
      const int64_t head = query % group_;
      if (head == 0) {
        kernels_.weigh(power, n, weights[query - begin]);
      } else {
        kernels_.add_weighed(power - head * kExpsStride, power, n, weights[query - begin]);
      }
      if (windowed() && head == group_ - 1) {
        set_beyond_window(block, query / group_, power - head * kExpsStride, 0);
      }
    }
  }
}

void Tile::add_to_scores(int64_t block, float* received) const {
  const KvPolicy& policy = keys_.head().policy;
  const int64_t first_scored = policy.first_scored(keys_.segment().n_rows) - first_;
  const auto accumulate = policy.scoring == Scoring::question ? kernels_.raise : kernels_.add;
  for (int64_t i = std::max(first_row(block), first_scored); i < n_; ++i) {
    float* attention = received + i * group_ * kExpsStride;
    const int64_t begin = block * kKeyBlock;
    const bool decays = policy.decay != 1, stored = bool{attention_.k};
    if (decays && !stored) {  // the scores already decayed for all rows
      const auto later = static_cast<float>(keys_.segment().n_rows - 1 - first_ - i);
      kernels_.scale(attention, n_keys(block, i), std::pow(policy.decay, later));
    }
    for (const KvRows& part : keys_.keys(begin, begin + n_keys(block, i))) {
      if (decays && stored) kernels_.scale(part.scores, part.n, policy.decay);
      accumulate(part.scores, attention, part.n);
      attention += part.n;
    }
  }
}

}  // namespace h2o
