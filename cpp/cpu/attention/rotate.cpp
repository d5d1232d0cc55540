#include "cpu/attention/rotate.h"

#include <cmath>
#include <vector>

#include "cpu/attention/evict.h"

namespace h2o {

void compute_rope_table(float* rope_table, const Rope& rope, int32_t position) {
  const int64_t half = rope.frequencies.cols;
  for (int64_t i = 0; i < half; ++i) {
    // In f32, as transformers and llama.cpp compute it.
    const float angle = static_cast<float>(position) * rope.frequencies.floats()[i];
    // In double: the last bits of cosf and sinf differ between C libraries.
    rope_table[i] = static_cast<float>(std::cos(double{angle})) * rope.magnitude;
    rope_table[half + i] = static_cast<float>(std::sin(double{angle})) * rope.magnitude;
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
    type.encode(stored, key.data(), cache.head_dim);
  }
  std::vector<int32_t> order(written);
  rank_slots(head, written, vacant, order.data());
}

}  // namespace h2o
