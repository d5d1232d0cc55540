#include "kv/attention_cache.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>
#include <string>

#include "core/error.h"
#include "kv/range.h"

namespace h2o {
namespace {

Tensor row(const Buffer& floats) {
  if (floats.size() == 0) return {};
  const auto n = static_cast<int64_t>(floats.size() / sizeof(float));
  return {floats.data(), DType::f32, 1, n};
}

// Without the sign, the bits of NaN and infinity exceed those of every number.
void check_range(const char* name, const FloatArray& x, float largest) {
  const std::span values(x.data, static_cast<size_t>(x.shape[0] * x.shape[1] * x.shape[2]));
  const auto magnitude = [](float value) { return std::bit_cast<uint32_t>(value) & 0x7fffffff; };
  uint32_t found = 0;
  for (const float value : values) found = std::max(found, magnitude(value));
  if (found <= magnitude(largest)) return;
  const auto worst = std::ranges::find(values, found, magnitude);
  throw InvalidArgument(concat("[attend] ", name, " has ", *worst,
                               ", expected finite numbers of at most ", largest, " here"));
}

}  // namespace

AttentionCache::AttentionCache(std::unique_ptr<Backend> backend, const KvPolicy& policy,
                               const KvShape& shape, const std::optional<Rotary>& rotary,
                               const HeadLogits& logits,
                               std::optional<std::span<const float>> output_gram)
    : backend_(std::move(backend)),
      rope_(upload(rotary, shape.head_dim)),
      sinks_(upload(logits.sinks, shape.n_heads)),
      slopes_(upload(logits.slopes, shape.n_heads)),
      rolling_(rotary && rotary->rolling),
      cache_(*backend_, policy, completed(shape, output_gram)),
      largest_product_(std::sqrt(std::numeric_limits<float>::max() /
                                 static_cast<float>(cache_.shape().head_dim)) /
                       2) {
  for (int32_t s = 0; s < shape.n_sequences; ++s) start(s);
}

std::vector<float> AttentionCache::attend(const FloatArray& q, const FloatArray& k,
                                          const FloatArray& v, const Lengths& lengths) {
  const std::lock_guard lock(mutex_);
  const KvShape& shape = cache_.shape();
  const int64_t n = q.shape.size() == 3 ? q.shape[0] : 0;
  check("q", q, n, shape.n_heads);
  check("k", k, n, shape.n_kv_heads);
  check("v", v, n, shape.n_kv_heads);
  check_range("q", q, largest_product_);
  check_range("k", k, std::min(largest_product_, largest_stored(shape.k_dtype)));
  check_range("v", v, std::min(largest_product_, largest_stored(shape.v_dtype)));
  check(lengths, n);
  if (n > shape.max_rows) cache_.reserve_rows(static_cast<int32_t>(n));

  const auto upload = [&](const float* data, int64_t heads, Buffer& buffer) {
    const Tensor t{nullptr, DType::f32, n, heads * shape.head_dim};
    if (static_cast<int64_t>(buffer.size()) < t.bytes()) buffer = backend_->allocate(t.bytes());
    if (data != nullptr) backend_->write(buffer.data(), data, t.bytes());
    return Tensor{buffer.data(), t.dtype, t.rows, t.cols};
  };
  const Attention attention{
      .out = upload(nullptr, shape.n_heads, out_),
      .q = upload(q.data, shape.n_heads, q_),
      .k = upload(k.data, shape.n_kv_heads, k_),
      .v = upload(v.data, shape.n_kv_heads, v_),
      .rope = rope_,
      .scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim)),
      .sinks = row(sinks_),
      .slopes = row(slopes_),
  };
  Batch batch;
  for (const auto& [sequence, rows] : lengths) {
    batch.add(sequence, cache_.length(sequence), std::vector<int32_t>(rows),
              cache_.rolling(sequence));
  }
  backend_->run(batch, [&] { backend_->attend(attention, cache_.layer(0), batch); });
  cache_.advance(batch);
  std::vector<float> out(n * attention.out.cols);
  backend_->read(out.data(), attention.out.data, attention.out.bytes());
  return out;
}

std::vector<KvEntry> AttentionCache::kept(int32_t kv_head, int32_t sequence) {
  const std::lock_guard lock(mutex_);
  return cache_.entries(0, sequence, kv_head);
}

void AttentionCache::reset(int32_t sequence, const std::optional<KvPolicy>& policy) {
  const std::lock_guard lock(mutex_);
  if (policy) {
    cache_.reset(sequence, {&*policy, 1});
  } else {
    cache_.reset(sequence);
  }
  start(sequence);
}

int32_t AttentionCache::length(int32_t sequence) {
  const std::lock_guard lock(mutex_);
  return cache_.length(sequence);
}

Rope AttentionCache::upload(const std::optional<Rotary>& rotary, int32_t head_dim) {
  if (!rotary) return {};
  const auto n = std::ssize(rotary->frequencies);
  require(n > 0 && 2 * n <= head_dim, n, " rotary frequencies, expected 1 to head_dim / 2");
  frequencies_ = backend_->allocate(n * sizeof(float));
  backend_->write(frequencies_.data(), rotary->frequencies.data(), n * sizeof(float));
  return {.layout = rotary->pairs ? RopeLayout::pairs : RopeLayout::halves,
          .frequencies = {frequencies_.data(), DType::f32, 1, n}};
}

Buffer AttentionCache::upload(const std::vector<float>& of_heads, int32_t n_heads) {
  if (of_heads.empty()) return {};
  require(std::ssize(of_heads) == n_heads, of_heads.size(), " numbers, expected one for each of ",
          n_heads, " heads");
  Buffer buffer = backend_->allocate(n_heads * sizeof(float));
  backend_->write(buffer.data(), of_heads.data(), buffer.size());
  return buffer;
}

KvShape AttentionCache::completed(KvShape shape,
                                  std::optional<std::span<const float>> output_gram) {
  if (rolling_) shape.rope = rope_;
  if (output_gram) {
    require(std::ssize(*output_gram) == int64_t{shape.n_kv_heads} * shape.head_dim * shape.head_dim,
            "output_gram has ", output_gram->size(), " elements, expected [", shape.n_kv_heads,
            ", ", shape.head_dim, ", ", shape.head_dim, "]");
    output_gram_ = backend_->allocate(output_gram->size_bytes());
    backend_->write(output_gram_.data(), output_gram->data(), output_gram_.size());
    shape.output_gram = output_gram_.as<float>();
  }
  return shape;
}

void AttentionCache::start(int32_t sequence) {
  if (rolling_) cache_.roll(sequence);
}

void AttentionCache::check(const char* name, const FloatArray& x, int64_t n, int32_t heads) const {
  const int32_t head_dim = cache_.shape().head_dim;
  std::string got;
  for (const int64_t size : x.shape) got += concat(got.empty() ? "" : ", ", size);
  require(x.shape == std::vector<int64_t>{n, heads, head_dim}, name, " has shape [", got,
          "], expected [n, ", heads, ", ", head_dim, "] with the same n for q, k and v");
}

void AttentionCache::check(const Lengths& lengths, int64_t n) const {
  int64_t total = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto [sequence, rows] = lengths[i];
    require(rows > 0, "sequence ", sequence, " has no rows, expected at least one");
    require(rows <= cache_.room(sequence), rows, " more tokens for sequence ", sequence,
            ", the cache has room for ", cache_.room(sequence), " (max_tokens ",
            cache_.shape().max_tokens, ")");
    for (size_t j = 0; j < i; ++j) {
      require(lengths[j].first != sequence, "sequence ", sequence, " is named twice");
    }
    total += rows;
  }
  require(total == n && n > 0, "the sequences have ", total, " rows, q has ", n,
          ", expected the same number and at least one");
}

// The largest value of a stored row; rotation increases a value by at most sqrt(2).
float AttentionCache::largest_stored(DType dtype) const {
  const float most = most_stored(dtype);
  const bool grows = most < FLT_MAX && rope_.layout != RopeLayout::none;
  return grows ? most / 1.4143f : most;
}

}  // namespace h2o
