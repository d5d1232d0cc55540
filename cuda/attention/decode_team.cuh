// Decode attention of one query row over a part of the slots: how threads divide the work.
#pragma once

#include "cuda/attention/decode_rows.cuh"
#include "cuda/attention/kv_types.cuh"
#include "cuda/runtime/reduce.cuh"
#include "kv/view.h"

namespace h2o::cuda {

constexpr int kTeamThreads = 128;  // per block
constexpr int kMaxSplits = 128;
constexpr int32_t kMinSplitLength = 64;  // slots

// The slots in use are split into parts of this length, at most kMaxSplits. Depends only on their
// number, so that a sequence's results do not depend, bit for bit, on the rest of the batch.
__host__ __device__ inline int32_t split_length(int32_t used) {
  int32_t length = kMinSplitLength;
  while (int64_t{length} * kMaxSplits < used) length *= 2;
  return length;
}

// The most splits of any number of slots up to `slots`.
__host__ __device__ inline int32_t most_splits(int32_t slots) {
  const int32_t n = (slots + kMinSplitLength - 1) / kMinSplitLength;
  return n < kMaxSplits ? n : kMaxSplits;
}

// The workspace, for each sequence of the batch, head and split.
struct Partials {
  __host__ __device__ Partials(const KvView& cache, std::byte* base)
      : n_splits(most_splits(cache.slots)) {
    const int64_t heads = int64_t{cache.n_sequences} * cache.n_heads;
    stride = (cache.slots + 3) / 4 * 4;
    logits = reinterpret_cast<float*>(base);
    out = logits + heads * stride;
    largest = out + heads * n_splits * cache.head_dim;
    total = largest + heads * n_splits;
    bytes = static_cast<size_t>(heads * (stride + n_splits * (int64_t{cache.head_dim} + 2))) *
            sizeof(float);
  }

  int32_t n_splits;
  int64_t stride;
  float* logits;   // [heads, stride] scaled
  float* out;      // [heads, n_splits, head_dim] weighted by e^(logit - largest)
  float* largest;  // [heads, n_splits] largest logit
  float* total;    // [heads, n_splits] sum of the weights
  size_t bytes;
};

// Modifies the logits of a sequence's newest token, for query heads from `first_head` on.
struct SlotLogits {
  const LogitChanges& changes;
  const KvHead& head;
  const Segment& segment;
  int first_head;

  // For query head h and the key in `slot`. With rolling positions, distances are differences of
  // ranks.
  __device__ float operator()(float logit, int h, int slot) const {
    return changes.changed(logit, first_head + h, [&] {
      return segment.rolling ? head.policy.kept(segment.position) - head.ranks[slot]
                             : segment.position - head.positions[slot];
    });
  }
};

// A team's threads, each of which has eight elements of a key at a time: a power of two.
__host__ __device__ constexpr int log_team_lanes(int head_dim) {
  return head_dim <= 64 ? 3 : head_dim <= 128 ? 4 : 5;
}

// Softmax of kHeads query heads over some keys, and the weighted values. A team of `lanes` threads
// processes one key at a time, each thread kOctets times eight elements.
template <int kOctets, int kHeads>
struct Team {
  const int log_lanes;
  const int lanes = 1 << log_lanes;
  const int n_teams = kTeamThreads >> log_lanes;
  const int team = threadIdx.x >> log_lanes;
  const int lane = threadIdx.x & (lanes - 1);

  explicit __device__ Team(int log_lanes) : log_lanes(log_lanes) {}

  // Bytes of shared memory for merge().
  static size_t shared_bytes(int log_lanes) {
    const int width = kOctets * 8 << log_lanes;
    return size_t{sizeof(float)} * (kTeamThreads >> log_lanes) * kHeads * (width + 2);
  }

  // The first element of the thread's octet c.
  __device__ int element(int c) const { return (c * lanes + lane) * 8; }

  __device__ void load_queries(const float* from, int n_heads, int head_dim, float scale) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      largest[h] = -INFINITY;
      total[h] = 0;
#pragma unroll
      for (int c = 0; c < kOctets; ++c) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int e = element(c) + j;
          q[h][c].x[j] = h < n_heads && e < head_dim ? from[h * head_dim + e] * scale : 0;
          out[h][c].x[j] = 0;
        }
      }
    }
  }

  // Slots [begin, end), every n_teams-th of them; logits [n_heads, stride].
  template <class Rows>
  __device__ void attend(const Rows& rows, const SlotLogits& changed, int begin, int end,
                         int n_heads, float* logits, int64_t stride) {
    constexpr int kAhead = Rows::template kAhead<kHeads>;
    const int per_round = n_teams * kAhead;
    typename Rows::Key k[kAhead][kOctets];
    typename Rows::Value v[kAhead][kOctets];
    // Each round is loaded during the previous one. Within a single round the compiler would move
    // loads after independent code, and a thread would wait for memory several times.
    const auto load = [&](int round, const auto& put) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        // Past the end: loaded, but given no weight.
        const int slot = min(round + team + i * n_teams, end - 1);
#pragma unroll
        for (int c = 0; c < kOctets; ++c) put(i, c, slot);
      }
    };
    const auto load_keys = [&](int round) {
      load(round, [&](int i, int c, int slot) { k[i][c] = rows.key(slot, element(c)); });
    };
    const auto load_values = [&](int round) {
      load(round, [&](int i, int c, int slot) { v[i][c] = rows.value(slot, element(c)); });
    };
    load_keys(begin);
    load_values(begin);
    // The same number of rounds for every team, because the lanes of a warp may belong to several.
    for (int round = begin; round < end; round += per_round) {
      const int first = round + team;
      float p[kAhead][kHeads];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) p[i][h] = 0;
#pragma unroll
        for (int c = 0; c < kOctets; ++c) {
          const Octet key = rows.unpack_key(k[i][c], element(c));
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
#pragma unroll
            for (int j = 0; j < 8; ++j) p[i][h] = fmaf(q[h][c].x[j], key.x[j], p[i][h]);
          }
        }
      }
      if (round + per_round < end) load_keys(round + per_round);
      for (int apart = lanes / 2; apart > 0; apart /= 2) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            p[i][h] += __shfl_xor_sync(kAllLanes, p[i][h], apart);
          }
        }
      }
      if (changed.changes.any()) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            p[i][h] = changed(p[i][h], min(h, n_heads - 1), min(first + i * n_teams, end - 1));
          }
        }
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float most = largest[h];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int slot = first + i * n_teams;
          if (slot < end) {
            most = fmaxf(most, p[i][h]);
            if (lane == 0 && h < n_heads) logits[h * stride + slot] = p[i][h];
          }
        }
        const float shrink = exp_negative(largest[h] - most);
        largest[h] = most;
        total[h] *= shrink;
#pragma unroll
        for (int c = 0; c < kOctets; ++c) {
#pragma unroll
          for (int j = 0; j < 8; ++j) out[h][c].x[j] *= shrink;
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          p[i][h] = first + i * n_teams < end ? exp_negative(p[i][h] - most) : 0;
          total[h] += p[i][h];
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int c = 0; c < kOctets; ++c) {
          const Octet value = rows.unpack_value(v[i][c]);
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              out[h][c].x[j] = fmaf(p[i][h], value.x[j], out[h][c].x[j]);
            }
          }
        }
      }
      if (round + per_round < end) load_values(round + per_round);
    }
  }

  // Merges the teams of the block, in order, into out [n_heads, n_splits, head_dim] and the softmax
  // of each head. Teams write sequentially. `shared`: see shared_bytes().
  __device__ void merge(float* shared, const Partials& partials, int split_index, int64_t query,
                        int n_heads, int head_dim) const {
    const int width = lanes * kOctets * 8;
    float* const sums = shared + n_teams * kHeads * 2;  // [n_teams, kHeads, width]
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int mine = team * kHeads + h;
      if (lane == 0) {
        shared[2 * mine] = largest[h];
        shared[2 * mine + 1] = total[h];
      }
#pragma unroll
      for (int c = 0; c < kOctets; ++c) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[mine * width + element(c) + j] = out[h][c].x[j];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_heads * head_dim; i += kTeamThreads) {
      const int h = i / head_dim, e = i % head_dim;
      float most = -INFINITY;
      for (int t = 0; t < n_teams; ++t) most = fmaxf(most, shared[2 * (t * kHeads + h)]);
      float sum = 0, weights = 0;
      for (int t = 0; t < n_teams; ++t) {
        const float* softmax = shared + 2 * (t * kHeads + h);
        // A team without slots has no weight and zero sums.
        const float weight = exp_negative(softmax[0] - most);
        sum = fmaf(weight, sums[(t * kHeads + h) * width + e], sum);
        weights = fmaf(weight, softmax[1], weights);
      }
      const int64_t split = (query + h) * partials.n_splits + split_index;
      partials.out[split * head_dim + e] = sum;
      if (e == 0) {
        partials.largest[split] = most;
        partials.total[split] = weights;
      }
    }
  }

  Octet q[kHeads][kOctets], out[kHeads][kOctets];
  float largest[kHeads], total[kHeads];
};

}  // namespace h2o::cuda
