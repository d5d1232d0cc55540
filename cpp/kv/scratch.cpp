#include "kv/scratch.h"

#include <algorithm>
#include <vector>

#include "core/layout.h"

namespace h2o {
namespace {

// The rope_table of ranks 0 to n - 1, if sequences may roll.
Buffer make_rope_table(Backend& backend, const KvShape& shape, int64_t n_ranks) {
  if (!shape.may_roll()) return {};
  const int64_t n_rot = shape.rope.n_rot();
  Buffer rope_table = backend.allocate(n_ranks * n_rot * sizeof(float));
  backend.compute_rope_table({rope_table.data(), DType::f32, n_ranks, n_rot}, shape.rope);
  return rope_table;
}

}  // namespace

KvScratch::KvScratch(Backend& backend, std::span<KvView> layers, const KvShape& shape,
                     const KvArchive* archive) {
  const int32_t max_rows = shape.max_rows;
  const int64_t rows = int64_t{shape.n_kv_heads} * max_rows;
  const auto archives = [&](int32_t layer) {
    return archive != nullptr && !archive->kv_heads(layer).empty();
  };
  int64_t n_ranks = 0, k_bytes = 0, v_bytes = 0;  // bytes of a row of all heads
  size_t workspace_bytes = 0;
  for (int32_t l = 0; l < shape.n_layers; ++l) {  // one with fewer slots or no scores may need more
    KvView view = layers[l];
    view.layer = l;
    view.max_rows = max_rows;
    view.archive = archives(l) ? archive : nullptr;
    n_ranks = std::max(n_ranks, int64_t{view.slots} + max_rows);
    k_bytes = std::max(k_bytes, view.n_kv_heads * view.k_row_bytes);
    v_bytes = std::max(v_bytes, view.n_kv_heads * view.v_row_bytes);
    workspace_bytes = std::max(workspace_bytes, backend.attend_workspace(view));
  }
  Layout layout;
  struct Staging {
    int64_t k, v, scores, norms;  // offsets
  };
  const auto place_staging = [&]() -> Staging {
    const int64_t k = layout.place(max_rows * k_bytes);
    return {k, shape.shared_values ? k : layout.place(max_rows * v_bytes),
            layout.place(rows * int64_t{sizeof(float)}),
            layout.place(rows * int64_t{sizeof(float)})};
  };
  // Rows that later layers read stay staged until these have.
  std::vector<Staging> staging(shape.n_layers, place_staging());
  for (int32_t l = 0; l < shape.n_layers; ++l) {
    const auto readers = std::ranges::count(shape.sources, l);
    if (readers > 1) staging[l] = place_staging();
    staging[l] = staging[shape.source(l)];
  }
  std::vector<ArchiveMemory> sequences;
  for (int32_t s = 0; archive != nullptr && s < shape.n_sequences; ++s) {
    sequences.push_back(archive->memory(s));
  }
  const std::span<const ArchiveMemory> memories(sequences);
  const int64_t archives_at = layout.place(static_cast<int64_t>(memories.size_bytes()));
  const auto heads = archive != nullptr ? archive->indices() : std::span<const int32_t>();
  const int64_t heads_at = layout.place(static_cast<int64_t>(heads.size_bytes()));
  const int64_t workspace_at = layout.place(static_cast<int64_t>(workspace_bytes));
  memory_ = backend.allocate(layout.size());
  if (!memories.empty()) {
    backend.write(memory_.data() + archives_at, memories.data(), memories.size_bytes());
    backend.write(memory_.data() + heads_at, heads.data(), heads.size_bytes());
  }
  rope_table_ = make_rope_table(backend, shape, n_ranks);

  // Nothing throws from here on.
  std::byte* const memory = memory_.data();
  for (int32_t l = 0; l < shape.n_layers; ++l) {
    KvView& view = layers[l];
    view.layer = l;
    view.max_rows = max_rows;
    view.staged_k = memory + staging[l].k;
    view.staged_v = memory + staging[l].v;
    view.staged_scores = reinterpret_cast<float*>(memory + staging[l].scores);
    view.staged_value_norms = reinterpret_cast<float*>(memory + staging[l].norms);
    view.rope_table = rope_table_.as<float>();
    view.workspace = memory + workspace_at;
    if (!archives(l)) continue;
    view.archive = archive;
    view.archives = reinterpret_cast<const ArchiveMemory*>(memory + archives_at);
    view.archive_heads =
        reinterpret_cast<const int32_t*>(memory + heads_at) + int64_t{l} * shape.n_kv_heads;
  }
}

}  // namespace h2o
