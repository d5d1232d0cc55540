#include <numbers>

#include "cuda/attention/attend.h"
#include "cuda/attention/prefill.h"
#include "cuda/attention/prefill_step.cuh"
#include "cuda/attention/recall.h"

namespace h2o::cuda {
namespace {

// Are cached rows as tiles need them?
bool are_halves(const KvView& cache) {
  return cache.k_dtype == DType::f16 && cache.v_dtype == DType::f16 &&
         cache.head_dim == tile_dim(cache.head_dim);
}

// Layout of one call's arrays in the workspace: those of PrefillStep that may be needed.
struct Workspace {
  explicit Workspace(const KvView& cache, std::byte* base = nullptr) {
    const auto take = [&]<class T>(T*& array, bool needed, int64_t n) {
      array = needed ? reinterpret_cast<T*>(base + bytes) : nullptr;
      if (needed) bytes += (n * sizeof(T) + 255) / 256 * 256;
    };
    const bool tiles = prefills_on_tiles(cache);
    const int64_t dim = tile_dim(cache.head_dim);
    const bool scores = cache.scores != nullptr;
    const int64_t queries = int64_t{cache.n_heads} * cache.max_rows;
    const int64_t keys = cache.n_kv_heads * (int64_t{cache.slots} + cache.max_rows);
    take(lse, scores || cache.archive != nullptr, queries);
    take(q_halves, scores && tiles, queries * dim);
    const bool unpacks = tiles && (!are_halves(cache) || cache.ranks != nullptr);
    take(k_halves, unpacks, keys * dim);
    take(v_halves, unpacks, keys * dim);
    const int32_t tile = tiles ? kMostTileQueries : kRowTileQueries;
    const int64_t partials = KeySplits::most_partials(cache, tile);
    take(splits.out, partials > 0, partials * cache.head_dim);
    take(splits.shift, partials > 0, partials);
    take(splits.total, partials > 0, partials);
  }

  size_t bytes = 0;
  float* lse;
  uint16_t* q_halves;
  uint16_t* k_halves;
  uint16_t* v_halves;
  KeySplits splits;
};

}  // namespace

// f32 would lose bits as f16. bf16 has fewer: numbers change beyond 65504, where they are clamped,
// below 6e-5, where they lose bits, and below 3e-8, where they become zero.
bool prefills_on_tiles(const KvView& cache) {
  return tile_dim(cache.head_dim) > 0 && cache.k_dtype != DType::f32 && cache.v_dtype != DType::f32;
}

size_t prefill_workspace(const KvView& shape) { return Workspace(shape).bytes; }

void prefill_attention(const Stream& stream, const Attention& attention, const KvView& cache,
                       const Segment& segment, std::byte* recalls, const Operands& operands) {
  const Workspace work(cache, cache.workspace);
  const int64_t width = attention.q.cols;
  const bool rotates = segment.rolling && attention.rope.layout != RopeLayout::none;
  const bool unpacks = rotates || !are_halves(cache);
  Operands own = operands;
  if (own.halves != nullptr) own.halves += segment.row * width;
  const PrefillStep step{
      .cache = cache,
      .segment = segment,
      .group = cache.n_heads / cache.n_kv_heads,
      .rope = attention.rope.layout,
      .n_rot = rotates ? static_cast<int32_t>(attention.rope.n_rot()) : 0,
      .scale = attention.scale * std::numbers::log2e_v<float>,
      .changes = LogitChanges(attention, std::numbers::log2e_v<float>),
      .window = attention.window,
      .reads = !attention.k,
      .tile_dim = tile_dim(cache.head_dim),
      .width = width,
      .q = attention.q.floats() + segment.row * width,
      .out = attention.out.floats() + segment.row * width,
      .operands = own,
      .lse = work.lse,
      .q_halves = work.q_halves,
      .k_halves = unpacks ? work.k_halves : nullptr,
      .v_halves = unpacks ? work.v_halves : nullptr,
      .splits = work.splits,
  };
  if (prefills_on_tiles(cache)) {
    if (unpacks) dequantize_rows(stream, step);
    prefill_mma(stream, step);
    if (recalls != nullptr) add_recalled(stream, attention, step, recalls);
    if (cache.scores != nullptr) score_tiles(stream, step);
  } else {
    prefill_f32(stream, step);
    if (recalls != nullptr) add_recalled(stream, attention, step, recalls);
    if (cache.scores != nullptr) score_rows(stream, step);
  }
  if (cache.scores_questions) score_questions(stream, step);
}

}  // namespace h2o::cuda
