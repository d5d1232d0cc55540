// decode_splits(), instantiated for one kind of Rows by each decode_*.cu: a single file would take
// as long to compile as all other kernels.
#pragma once

#include <type_traits>

#include "cuda/attention/attend.h"
#include "cuda/attention/decode_splits.h"
#include "cuda/attention/decode_team.cuh"
#include "cuda/runtime/in_flight.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

// Percentage that a multiprocessor hides while it waits for a round of rows: see in_flight.cuh.
template <class Rows, int kHeads>
constexpr size_t decode_latency_hidden() {
  constexpr size_t octets =
      size_t{kTeamThreads} * Rows::blocks(kHeads) * Rows::template kAhead<kHeads>;
  return latency_hidden(octets * Rows::kBlockBytes / 4, octets * (Rows::kUnpack + 16 * kHeads));
}

// One block per (segment, heads of a group, split).
template <class Rows, int kOctets, int kHeads>
__global__ void __launch_bounds__(kTeamThreads, (kOctets > 1 ? 2 : Rows::blocks(kHeads)))
    decode_kernel(Decode decode, KvView cache, DeviceBatch batch) {
  float* const shared = dynamic_shared<float>();
  if (gridDim.x <= kFewSegments) let_next_start();
  // Written by copies only.
  const Segment segment = batch.segments[blockIdx.x];
  const KvPolicy policy = cache.policies[segment.sequence];
  wait_for_previous();
  if (segment.n_rows != 1 || !Rows::handles(segment, decode)) return;
  const int group = cache.n_heads / cache.n_kv_heads;
  const int tiles = (group + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.y / tiles;
  const int first_head = kv_head * group + blockIdx.y % tiles * kHeads;
  const int n_heads = min(kHeads, (kv_head + 1) * group - first_head);
  const KvHead head = cache.head(policy, segment.sequence, kv_head);
  const int used = head.policy.kept(segment.position) + 1;
  const Partials partials(cache, cache.workspace);
  const int split = static_cast<int>(blockIdx.z);
  const int32_t length = split_length(used, decode.n_pools);
  const int begin = split * length;
  const int end = min(begin + length, used);
  if (begin >= end) return;

  const int64_t query = int64_t{segment.sequence} * cache.n_heads + first_head;
  const float* q = decode.q + (int64_t{segment.row} * cache.n_heads + first_head) * cache.head_dim;
  float* logits = partials.logits + query * partials.stride;
  Team<kOctets, kHeads, Rows::template kAhead<kHeads>> team(log_team_lanes(cache.head_dim));
  team.load_queries(q, n_heads, cache.head_dim, decode.scale);
  const SlotLogits changed{decode.changes, head, segment, first_head};
  team.attend(Rows(cache, head, decode, segment.rolling), changed, begin, end, n_heads, logits,
              partials.stride);
  let_next_start();
  if constexpr (kHeads == 4) {
    team.merge(shared, partials, split, query, n_heads, cache.head_dim);
  } else {  // not enough registers to keep them while reading rows: recompute
    std::byte* workspace = cache.workspace;
    asm volatile("" : "+l"(workspace));
    team.merge(shared, Partials(cache, workspace), split, query, n_heads, cache.head_dim);
  }
}

template <class Rows, int kOctets, int kHeads>
void launch_decode(const Stream& stream, const Decode& decode, const KvView& cache,
                   const DeviceBatch& batch) {
  if constexpr (!std::is_same_v<Rows, Single>) {
    // 100 needs more rows of quantized types than fit into registers with 8 heads or rotation.
    static_assert(decode_latency_hidden<Rows, kHeads>() >= 55);
  }
  const int group = cache.n_heads / cache.n_kv_heads;
  const int tiles = (group + kHeads - 1) / kHeads;
  const int32_t in_use = std::min(decode.in_use, cache.slots);
  const dim3 grid(batch.n_segments, cache.n_kv_heads * tiles, most_splits(in_use, decode.n_pools));
  using Threads = Team<kOctets, kHeads, Rows::template kAhead<kHeads>>;
  const size_t shared = Threads::shared_bytes(log_team_lanes(cache.head_dim));
  launch(stream, decode_kernel<Rows, kOctets, kHeads>, grid, dim3(kTeamThreads), shared, decode,
         cache, batch);
}

}  // namespace

template <class Rows>
void decode_splits(const Stream& stream, const Decode& decode, const KvView& cache,
                   const DeviceBatch& batch) {
  const int group = cache.n_heads / cache.n_kv_heads;
  const auto run = [&]<int kOctets, int kHeads>() {
    launch_decode<Rows, kOctets, kHeads>(stream, decode, cache, batch);
  };
  if constexpr (std::is_same_v<Rows, Single>) {
    if (cache.head_dim > 256) return run.template operator()<kMaxHeadDim / 256, 1>();
  }
  if (group == 1) {
    run.template operator()<1, 1>();
  } else if (group <= 4 || Rows::kMostHeads <= 4) {
    run.template operator()<1, 4>();
  } else if constexpr (Rows::kMostHeads > 4) {
    run.template operator()<1, 8>();
  }
}

}  // namespace h2o::cuda
