#include "cpu/attention/rotate.h"

#include <cmath>
#include <vector>

#include "cpu/attention/evict.h"
#include "kv/range.h"

namespace h2o {

namespace {

struct Turn {
  float cosine, sine;
};

// The rotation of pair i of a head.
Turn turn(const Rope& rope, int32_t position, int64_t i) {
  // The angle is f32, as in transformers and llama.cpp.
  const float angle = static_cast<float>(position) * rope.frequencies.floats()[i];
  // Cosine and sine are double: the last bits of cosf and sinf differ between C libraries.
  return {static_cast<float>(std::cos(double{angle})) * rope.magnitude,
          static_cast<float>(std::sin(double{angle})) * rope.magnitude};
}

}  // namespace

void compute_rope_table(float* rope_table, const Rope& rope, int32_t position) {
  const int64_t half = rope.frequencies.cols;
  for (int64_t i = 0; i < half; ++i) {
    const auto [cosine, sine] = turn(rope, position, i);
    rope_table[i] = cosine;
    rope_table[half + i] = sine;
  }
}

void rotate_heads(std::span<const std::span<float>> rows, int64_t head_dim, const Rope& rope,
                  int32_t position) {
  const int64_t half = rope.frequencies.cols;
  const bool pairs = rope.layout == RopeLayout::pairs;
  for (int64_t i = 0; i < half; ++i) {
    const auto [cosine, sine] = turn(rope, position, i);
    for (const std::span<float> row : rows) {
      for (size_t at = pairs ? 2 * i : i; at < row.size(); at += head_dim) {
        float& first = row[at];
        float& second = row[at + (pairs ? 1 : half)];
        const float a = first, b = second;
        first = a * cosine - b * sine;
        second = a * sine + b * cosine;
      }
    }
  }
}

void roll_head(const CpuKernels& kernels, const KvView& cache, const Rope& rope, const KvHead& head,
               int32_t length) {
  const TypeKernels& type = kernels.of(cache.k_dtype);
  Rope back = rope;
  back.magnitude = 1 / rope.magnitude;
  std::vector<float> rope_table(rope.n_rot());
  std::vector<float> key(cache.head_dim);
  const int32_t written = head.written(length);
  const int32_t vacant = head.vacant_slot(length);
  for (int32_t i = 0; i < written; ++i) {
    if (i == vacant) continue;
    std::byte* stored = head.k + i * cache.k_row_bytes;
    compute_rope_table(rope_table.data(), back, -head.positions[i]);
    type.decode(key.data(), stored, cache.head_dim);
    rotate(kernels, key.data(), rope_table.data(), rope);
    for (float& x : key) clamp_to(most_stored(cache.k_dtype), x);
    type.encode(stored, key.data(), cache.head_dim);
  }
  std::vector<int32_t> order(written);
  rank_slots(head, written, vacant, order.data());
}

}  // namespace h2o
