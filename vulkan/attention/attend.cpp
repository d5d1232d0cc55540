#include "vulkan/attention/attend.h"

#include <algorithm>

#include "vulkan/operations.h"

namespace h2o::vulkan {
namespace {

// Tiles of shaders/tiles.glsl: the queries of a workgroup, and its threads.
struct Tile {
  int32_t queries, threads;
};
constexpr Tile kFewQueries{4, 64}, kManyQueries{16, 128};
constexpr int32_t kTileKeys = 32, kTileDims = 64;

// The segments that one launch attends with.
struct Attended {
  int32_t first_segment, n_segments;
  int32_t n_rows;  // of each
  int32_t n_splits;
  bool decodes;
};

class Attending {
 public:
  Attending(Commands& commands, const Attention& attention, const KvView& cache,
            const DeviceBatch& batch)
      : commands_(commands), cache_(cache), splits_(cache) {
    Step step = describe(cache, attention.rope);
    place_workspace(step, cache);
    step.q = address_of(attention.q);
    step.new_k = address_of(attention.k);
    step.new_v = address_of(attention.v);
    step.out = address_of(attention.out);
    step.sinks = address_of(attention.sinks);
    step.slopes = address_of(attention.slopes);
    step.segments = batch.segments;
    step.segment_of = batch.segment_of;
    step.window = attention.window;
    step.reads = !attention.k;
    step.evicts = attention.evicts;
    step.scale = attention.scale;
    step.softcap = attention.softcap;
    step_ = commands.keep(step);
  }

  void store(int64_t n_rows) {
    commands_.barrier();
    commands_.launch(Shader::store_kv, types(), {n_rows, cache_.n_kv_heads}, step_);
  }

  // A segment without a cache.
  void whole(int32_t index, int32_t n_rows) { attend({index, 1, n_rows, 1, false}); }

  // The segments of one row.
  void decode(int32_t n_segments) {
    commands_.barrier();
    attend({0, n_segments, 1, splits_.of_decode(), true});
    commands_.barrier();
    commands_.launch(Shader::decode_scores, {}, {n_segments, cache_.n_kv_heads}, step_);
  }

  // A segment of several rows.
  void prefill(int32_t index, const Segment& segment, bool evicts) {
    commands_.barrier();
    attend({index, 1, segment.n_rows, splits_.of_chunk(segment.n_rows), false});
    const struct {
      uint64_t step;
      int32_t segment;
    } push{step_, index};
    if (cache_.scores != nullptr) {
      const int64_t n_keys =
          int64_t{std::min(segment.position, cache_.slots)} + segment.n_rows;  // at most
      commands_.barrier();
      commands_.launch(Shader::score, tiles(kManyQueries),
                       {tiles_of(n_keys, kTileKeys), cache_.n_kv_heads}, push);
    }
    if (!evicts) return;
    commands_.barrier();
    commands_.launch(Shader::admit, {}, {cache_.n_kv_heads}, push);
    commands_.barrier();
    commands_.launch(Shader::move, {}, {segment.n_rows, cache_.n_kv_heads}, push);
  }

 private:
  std::vector<uint32_t> types() const {
    return {static_cast<uint32_t>(cache_.k_dtype), static_cast<uint32_t>(cache_.v_dtype)};
  }
  std::vector<uint32_t> tiles(const Tile& tile) const {
    return {static_cast<uint32_t>(tile.threads),
            static_cast<uint32_t>(tile.queries),
            static_cast<uint32_t>((cache_.head_dim + kTileDims - 1) / kTileDims),
            types()[0],
            types()[1],
            cache_.policies == nullptr ? 1u : 0u};
  }

  void attend(const Attended& attended) {
    const int32_t n_queries = attended.n_rows * (cache_.n_heads / cache_.n_kv_heads);
    const Tile tile = n_queries <= kFewQueries.queries ? kFewQueries : kManyQueries;
    struct {
      uint64_t step;
      int32_t first_segment, n_segments, n_tiles, n_splits, decodes;
    } push{step_,
           attended.first_segment,
           attended.n_segments,
           (n_queries + tile.queries - 1) / tile.queries,
           attended.n_splits,
           attended.decodes};
    commands_.launch(
        Shader::attend, tiles(tile),
        {groups_of(int64_t{attended.n_segments} * push.n_tiles), cache_.n_kv_heads, push.n_splits},
        push);
    if (push.n_splits == 1) return;
    push.n_tiles = attended.n_rows;
    commands_.barrier();
    commands_.launch(Shader::merge, tiles(kFewQueries),
                     {int64_t{attended.n_segments} * attended.n_rows, cache_.n_heads}, push);
  }

  Commands& commands_;
  const KvView& cache_;
  Splits splits_;
  uint64_t step_;
};

}  // namespace

void attend(Commands& commands, const Attention& attention, const KvView& cache,
            const DeviceBatch& device_batch, const Batch& batch) {
  Attending attending(commands, attention, cache, device_batch);
  attending.store(attention.q.rows);
  const auto decodes = [](const Segment& segment) { return segment.n_rows == 1; };
  if (std::ranges::any_of(batch.segments, decodes)) {
    attending.decode(static_cast<int32_t>(batch.segments.size()));
  }
  for (size_t i = 0; i < batch.segments.size(); ++i) {
    const Segment& segment = batch.segments[i];
    if (!decodes(segment)) {
      attending.prefill(static_cast<int32_t>(i), segment, attention.evicts);
    }
  }
}

void attend_whole(Commands& commands, const Attention& attention, int64_t head_dim,
                  const DeviceBatch& device_batch, const Batch& batch) {
  KvView heads{};
  heads.head_dim = static_cast<int32_t>(head_dim);
  heads.n_heads = static_cast<int32_t>(attention.q.cols / head_dim);
  heads.n_kv_heads = static_cast<int32_t>(attention.k.cols / head_dim);
  commands.barrier();
  if (attention.rope.layout != RopeLayout::none) {
    rotate(commands, attention.q, head_dim, attention.rope, device_batch);
    rotate(commands, attention.k, head_dim, attention.rope, device_batch);
    commands.barrier();
  }
  Attending attending(commands, attention, heads, device_batch);
  for (size_t i = 0; i < batch.segments.size(); ++i) {
    attending.whole(static_cast<int32_t>(i), batch.segments[i].n_rows);
  }
}

void roll(Commands& commands, const KvView& cache, const Rope& rope, int32_t sequence,
          int32_t length) {
  if (length == 0) return;
  Rope back = rope;
  back.magnitude = 1 / rope.magnitude;
  const struct {
    uint64_t step;
    int32_t sequence, n_tokens;
  } push{commands.keep(describe(cache, back)), sequence, length};
  commands.barrier();
  commands.launch(Shader::roll, {static_cast<uint32_t>(cache.k_dtype)},
                  {groups_of(std::min(length, cache.slots)), cache.n_kv_heads}, push);
}

}  // namespace h2o::vulkan
