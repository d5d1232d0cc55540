// AttentionCache: one layer of the cache with the engine's attention, for callers that have their
// own model.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kv/cache.h"

namespace h2o {

// Rotary positions of an AttentionCache.
struct Rotary {
  std::vector<float> frequencies;  // radians per position
  bool pairs;                      // RopeLayout::pairs, otherwise halves
  bool rolling;
};

// One number per head; see Attention. Empty: none.
struct HeadLogits {
  std::vector<float> sinks;
  std::vector<float> slopes;
};

// A contiguous array of any shape.
struct FloatArray {
  const float* data;
  std::vector<int64_t> shape;
};

// Its functions may be called by several threads.
class AttentionCache {
 public:
  // (sequence, number of its rows), in the order of the rows.
  using Lengths = std::vector<std::pair<int32_t, int32_t>>;

  // output_gram: [n_kv_heads, head_dim, head_dim], see KvView. Throws InvalidArgument and
  // OutOfMemory.
  AttentionCache(std::unique_ptr<Backend> backend, const KvPolicy& policy, const KvShape& shape,
                 const std::optional<Rotary>& rotary, const HeadLogits& logits,
                 std::optional<std::span<const float>> output_gram);

  // Appends rows k and v [n, n_kv_heads, head_dim] and returns the attention [n, n_heads, head_dim]
  // of rows q. Throws InvalidArgument for other shapes, for numbers that are not finite or too
  // large for the cache's types, and for more tokens than fit.
  std::vector<float> attend(const FloatArray& q, const FloatArray& k, const FloatArray& v,
                            const Lengths& lengths);

  // Kept positions and their scores, in position order.
  std::vector<KvEntry> kept(int32_t kv_head, int32_t sequence);

  // Removes a sequence's tokens. With a policy, it has that policy from now on.
  void reset(int32_t sequence, const std::optional<KvPolicy>& policy);

  int32_t length(int32_t sequence);  // tokens seen
  const KvShape& shape() const { return cache_.shape(); }
  size_t bytes() const { return cache_.bytes(); }

 private:
  Rope upload(const std::optional<Rotary>& rotary, int32_t head_dim);
  Buffer upload(const std::vector<float>& of_heads, int32_t n_heads);
  KvShape completed(KvShape shape, std::optional<std::span<const float>> output_gram);
  void start(int32_t sequence);
  void check(const char* name, const FloatArray& x, int64_t n, int32_t heads) const;
  void check(const Lengths& lengths, int64_t n) const;
  float largest_stored(DType dtype) const;

  std::unique_ptr<Backend> backend_;
  Buffer frequencies_;
  Buffer output_gram_;
  const Rope rope_;
  const Buffer sinks_, slopes_;
  const bool rolling_;
  KvCache cache_;
  const float largest_product_;  // up to this value, sums of products and of values fit in float
  Buffer out_, q_, k_, v_;
  std::mutex mutex_;
};

}  // namespace h2o
