#include "cpu/rotate.h"

#include <cmath>

namespace h2o {

void rotate_heads(float* x, int64_t n_heads, int64_t head_dim, const Rope& rope, int32_t position) {
  const int64_t half = rope.frequencies.cols;
  const bool pairs = rope.layout == RopeLayout::pairs;
  const int64_t apart = pairs ? 1 : half;  // of the two dimensions that turn together
  for (int64_t i = 0; i < half; ++i) {
    // In f32, as transformers and llama.cpp do.
    const float angle = static_cast<float>(position) * rope.frequencies.floats()[i];
    const float cosine = std::cos(angle) * rope.magnitude;
    const float sine = std::sin(angle) * rope.magnitude;
    float* pair = x + (pairs ? 2 * i : i);
    for (int64_t h = 0; h < n_heads; ++h, pair += head_dim) {
      const float a = pair[0];
      const float b = pair[apart];
      pair[0] = a * cosine - b * sine;
      pair[apart] = a * sine + b * cosine;
    }
  }
}

}  // namespace h2o
