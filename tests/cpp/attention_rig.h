// Runs the back end's attention through a KvCache, with generated input.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "device_rig.h"
#include "kv/cache.h"
#include "testing.h"

namespace h2o {

// The next tokens of one sequence.
struct Piece {
  int32_t sequence;
  int32_t n_rows;
};

// The rows of a batch.
struct Qkv {
  std::vector<float> q;     // [n, n_heads * head_dim]
  std::vector<float> k, v;  // [n, n_kv_heads * head_dim]

  // Rows [begin, begin + n).
  Qkv rows(const KvShape& shape, int64_t begin, int64_t n) const {
    const auto cut = [&](const std::vector<float>& x, int64_t heads) {
      const int64_t width = heads * shape.head_dim;
      return std::vector<float>(x.begin() + begin * width, x.begin() + (begin + n) * width);
    };
    return {cut(q, shape.n_heads), cut(k, shape.n_kv_heads), cut(v, shape.n_kv_heads)};
  }
};

// Batches one after the other.
inline Qkv joined(Qkv all, const Qkv& next) {
  all.q.insert(all.q.end(), next.q.begin(), next.q.end());
  all.k.insert(all.k.end(), next.k.begin(), next.k.end());
  all.v.insert(all.v.end(), next.v.begin(), next.v.end());
  return all;
}

inline Qkv random_qkv(Random& random, const KvShape& shape, int64_t n) {
  return {random.reals(n * shape.n_heads * shape.head_dim),
          random.reals(n * shape.n_kv_heads * shape.head_dim),
          random.reals(n * shape.n_kv_heads * shape.head_dim)};
}

inline float attention_scale(const KvShape& shape) {
  return 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
}

// Modifications of logits; see Attention.
struct LogitRules {
  float softcap = 0;
  std::vector<float> sinks = {}, slopes = {};  // of each query head, or empty
  bool of_ranks = false;                       // slopes multiply distances in ranks
  bool allow_bf16 = false;                     // see Attention

  // For query heads [begin, end).
  LogitRules of_heads(int32_t begin, int32_t end) const {
    const auto some = [&](const std::vector<float>& x) {
      return x.empty() ? x : std::vector<float>(x.begin() + begin, x.begin() + end);
    };
    return {softcap, some(sinks), some(slopes), of_ranks, allow_bf16};
  }
};

// A rope for any head_dim; the frequencies are in host memory.
inline Rope rope_of(int32_t head_dim) {
  static const std::vector<float> frequencies = [] {
    std::vector<float> powers;
    for (int i = 0; i < 64; ++i) powers.push_back(std::pow(0.7f, static_cast<float>(i)));
    return powers;
  }();
  auto* data = reinterpret_cast<std::byte*>(const_cast<float*>(frequencies.data()));
  return {.layout = RopeLayout::halves, .frequencies = {data, DType::f32, 1, head_dim / 2}};
}

// Frequencies of zero: keys are rotated when read, by an angle of zero.
inline Rope still(int32_t head_dim) {
  static const std::vector<float> zeros(512);
  auto* data = reinterpret_cast<std::byte*>(const_cast<float*>(zeros.data()));
  return {.layout = RopeLayout::halves, .frequencies = {data, DType::f32, 1, head_dim / 2}};
}

// A cache on the test device. If the shape may roll, it does from the start, unless `original`;
// with rotary positions.
class Rig {
 public:
  Rig(const KvPolicy& policy, const KvShape& shape, int n_threads = 1, bool original = false)
      : Rig(std::span(&policy, 1), shape, n_threads, original) {}

  Rig(std::span<const KvPolicy> policies, const KvShape& shape, int n_threads = 1,
      bool original = false)
      : Rig(test_backend(n_threads), policies, shape, original) {}

  Rig(std::unique_ptr<Backend> backend, std::span<const KvPolicy> policies, const KvShape& shape,
      bool original = false)
      : backend_(std::move(backend)),
        cache_(*backend_, policies, uploaded(shape)),
        rolling_(shape.may_roll() && !original) {
    for (int32_t s = 0; s < shape.n_sequences; ++s) start(s);
  }

  void reset(int32_t sequence, std::span<const KvPolicy> policies = {}) {
    cache_.reset(sequence, policies);
    start(sequence);
  }

  // See Attention::window.
  void set_window(int32_t window) { window_ = window; }
  void set_logits(const LogitRules& rules) {
    const auto uploaded = [&](std::optional<DeviceMatrix>& to, const std::vector<float>& x) {
      if (!x.empty()) to.emplace(*backend_, x, 1, std::ssize(x));
    };
    softcap_ = rules.softcap;
    allow_bf16_ = rules.allow_bf16;
    uploaded(sinks_, rules.sinks);
    uploaded(slopes_, rules.slopes);
  }

  void roll(int32_t sequence) { cache_.roll(sequence); }

  // The attention output [n, n_heads * head_dim] of the rows of `pieces`, concatenated.
  std::vector<float> attend(const std::vector<Piece>& pieces, const Qkv& in) {
    Batch batch;
    for (const Piece& piece : pieces) {
      batch.add(piece.sequence, cache_.length(piece.sequence), std::vector<int32_t>(piece.n_rows),
                cache_.rolling(piece.sequence));
    }
    const KvShape& shape = cache_.shape();
    const int64_t n = batch.n_rows();
    const int64_t width = int64_t{shape.n_heads} * shape.head_dim;
    const int64_t kv_width = int64_t{shape.n_kv_heads} * shape.head_dim;
    DeviceMatrix out(*backend_, n, width);
    DeviceMatrix q(*backend_, n, width), k(*backend_, n, kv_width), v(*backend_, n, kv_width);
    v.write(in.v);
    for (int32_t layer = 0; layer < shape.n_layers; ++layer) {
      q.write(in.q);  // the previous layer has rotated them in place
      k.write(in.k);
      const Attention attention{.out = out,
                                .q = q,
                                .k = k,
                                .v = v,
                                .rope = shape.rope,
                                .scale = attention_scale(shape),
                                .window = window_,
                                .softcap = softcap_,
                                .sinks = sinks_ ? Tensor(*sinks_) : Tensor(),
                                .slopes = slopes_ ? Tensor(*slopes_) : Tensor(),
                                .allow_bf16 = allow_bf16_};
      backend_->run(batch, [&] { backend_->attend(attention, cache_.layer(layer), batch); });
    }
    cache_.advance(batch);
    return out.read();
  }

  // The same for n rows of a sequence, in steps of one.
  std::vector<float> attend_singly(int32_t sequence, int32_t n, const Qkv& in) {
    std::vector<float> all;
    for (int32_t i = 0; i < n; ++i) {
      const std::vector<float> out = attend({{sequence, 1}}, in.rows(cache_.shape(), i, 1));
      all.insert(all.end(), out.begin(), out.end());
    }
    return all;
  }

  KvCache& cache() { return cache_; }

  // The cached rows of one sequence and kv_head, in position order.
  std::vector<KvEntry> entries(int32_t sequence, int32_t kv_head) const {
    return cache_.entries(cache_.shape().n_layers - 1, sequence, kv_head);
  }

 private:
  void start(int32_t sequence) {
    if (rolling_) roll(sequence);
  }

  // With the rotary frequencies in the back end's memory.
  KvShape uploaded(KvShape shape) {
    Tensor& frequencies = shape.rope.frequencies;
    if (!frequencies) return shape;
    frequencies_ = backend_->allocate(frequencies.bytes());
    backend_->write(frequencies_.data(), frequencies.data, frequencies.bytes());
    frequencies.data = frequencies_.data();
    return shape;
  }

  std::unique_ptr<Backend> backend_;
  Buffer frequencies_;
  KvCache cache_;
  const bool rolling_;
  int32_t window_ = 0;
  bool allow_bf16_ = false;
  float softcap_ = 0;
  std::optional<DeviceMatrix> sinks_, slopes_;
};

inline bool same_entries(const std::vector<KvEntry>& a, const std::vector<KvEntry>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const KvEntry& x, const KvEntry& y) {
    return x.position == y.position && same_bits(x.score, y.score);
  });
}

// Do two caches keep the same tokens of a sequence, with bit-identical scores?
inline bool same_entries(const Rig& a, int32_t sequence_a, const Rig& b, int32_t sequence_b,
                         int32_t n_kv_heads) {
  for (int32_t kv_head = 0; kv_head < n_kv_heads; ++kv_head) {
    if (!same_entries(a.entries(sequence_a, kv_head), b.entries(sequence_b, kv_head))) return false;
  }
  return true;
}

}  // namespace h2o
