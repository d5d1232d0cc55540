#include <numbers>

#include "cuda/attend_prefill.h"
#include "cuda/attend_rows.h"
#include "cuda/prefill_step.cuh"

namespace h2o::cuda {
namespace {

// Where the arrays of one call lie in its workspace.
struct Workspace {
  explicit Workspace(const KvView& cache, std::byte* base = nullptr) {
    const auto take = [&](bool needed, size_t n) {
      std::byte* const taken = needed ? base + bytes : nullptr;
      if (needed) bytes += (n + 255) / 256 * 256;
      return taken;
    };
    const size_t queries = size_t{1} * cache.n_heads * cache.max_rows;
    lse = reinterpret_cast<float*>(take(cache.scores != nullptr, queries * sizeof(float)));
  }

  size_t bytes = 0;
  float* lse;
};

}  // namespace

size_t prefill_workspace(const KvView& shape) { return Workspace(shape).bytes; }

void prefill_attention(const Stream& stream, const Attention& attention, const KvView& cache,
                       const Segment& segment) {
  const Workspace work(cache, cache.workspace);
  const int64_t width = attention.q.cols;
  const PrefillStep step{
      .cache = cache,
      .segment = segment,
      .group = cache.n_heads / cache.n_kv_heads,
      .rope = attention.rope.layout,
      .n_rot = segment.rolling && attention.rope.layout != RopeLayout::none
                   ? static_cast<int32_t>(attention.rope.n_rot())
                   : 0,
      .scale = attention.scale * std::numbers::log2e_v<float>,
      .width = width,
      .q = attention.q.floats() + segment.row * width,
      .out = attention.out.floats() + segment.row * width,
      .lse = work.lse,
  };
  attend_rows(stream, step);
  if (cache.scores != nullptr) score_rows(stream, step);
}

}  // namespace h2o::cuda
