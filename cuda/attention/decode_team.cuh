// Decode attention of one query row over a part of the slots: how threads divide the work.
#pragma once

#include <algorithm>

#include "cuda/attention/decode_rows.cuh"
#include "cuda/attention/kv_types.cuh"
#include "cuda/runtime/reduce.cuh"
#include "kv/view.h"

namespace h2o::cuda {

constexpr int kTeamThreads = 128;     // per block
constexpr unsigned kFewSegments = 8;  // leave room for the next kernel from the start
constexpr int kMaxSplits = 128;
constexpr int32_t kMinSplitLength = 64;  // slots
// Slots of a split that is long enough: its beginning and end are a seventh of the work.
constexpr int32_t kLongSplit = 512;
// Splits that keep a device busy: three on each of 132 multiprocessors, four times over.
constexpr int32_t kEnoughSplits = 1584;

// The slots in use are split into parts of this length, at most kMaxSplits; longer ones if
// n_pools (segment, kv_head) have enough of them.
__host__ __device__ inline int32_t split_length(int32_t used, int32_t n_pools) {
  int32_t length = kMinSplitLength;
  while (int64_t{length} * kMaxSplits < used ||
         (length < kLongSplit && int64_t{n_pools} * used > int64_t{kEnoughSplits} * length)) {
    length *= 2;
  }
  return length;
}

// The most splits of any number of slots up to `slots`.
inline int32_t most_splits(int32_t slots, int32_t n_pools) {
  const auto parts = [](int32_t n, int32_t length) { return (n + length - 1) / length; };
  const int32_t shorter = std::min(parts(slots, kMinSplitLength), parts(kEnoughSplits, n_pools));
  return std::min(kMaxSplits, std::max(shorter, parts(slots, kLongSplit)));
}

// The workspace, for each sequence of the batch, head and split.
struct Partials {
  __host__ __device__ Partials(const KvView& cache, std::byte* base)
      : n_splits(min(kMaxSplits, (cache.slots + kMinSplitLength - 1) / kMinSplitLength)) {
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

// Sums each of n values over `lanes` lanes whose numbers differ in their lowest bits: lane l gets
// the sums of values from l * n / lanes on.
template <int n, int lanes>
__device__ __forceinline__ void scatter_sums(const float* values, float* sums) {
  if constexpr (lanes == 1) {
#pragma unroll
    for (int i = 0; i < n; ++i) sums[i] = values[i];
  } else {
    // Each lane of a pair keeps one half of the values and passes the other to its partner.
    const bool upper = threadIdx.x & lanes / 2;
    float mine[n / 2];
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float given = upper ? values[i] : values[i + n / 2];
      mine[i] =
          (upper ? values[i + n / 2] : values[i]) + __shfl_xor_sync(kAllLanes, given, lanes / 2);
    }
    scatter_sums<n / 2, lanes / 2>(mine, sums);
  }
}

// Softmax of kHeads query heads over some keys, and the weighted values. A team of `lanes` threads
// processes kAhead keys at a time, each thread kOctets times eight elements. Logits are spread
// over kSpread lanes: each has kOwn of one head, and kPerHead lanes those of a head.
template <int kOctets, int kHeads, int kAhead>
struct Team {
  static constexpr int kLogits = kHeads * kAhead;
  static constexpr int kSpread = kLogits < 8 ? kLogits : 8;
  static constexpr int kOwn = kLogits / kSpread;
  static constexpr int kPerHead = kAhead / kOwn;
  static_assert(kPerHead * kHeads == kSpread);

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
    largest = -INFINITY;
    total = 0;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
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
    const int own_head = lane % kSpread / kPerHead, own_row = lane % kPerHead * kOwn;
    // The same number of rounds for every team, because the lanes of a warp may belong to several.
    for (int round = begin; round < end; round += per_round) {
      float p[kLogits] = {};  // [kHeads, kAhead]
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int c = 0; c < kOctets; ++c) {
          const Octet key = rows.unpack_key(k[i][c], element(c));
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            float& logit = p[h * kAhead + i];
            float sum = Rows::kScaled ? 0 : logit;
#pragma unroll
            for (int j = 0; j < 8; ++j) sum = fmaf(q[h][c].x[j], key.x[j], sum);
            if constexpr (Rows::kScaled) sum = fmaf(sum, rows.key_scale(k[i][c]), logit);
            logit = sum;
          }
        }
      }
      if (round + per_round < end) load_keys(round + per_round);
      float own[kOwn];
      scatter_sums<kLogits, kSpread>(p, own);
#pragma unroll
      for (int apart = kSpread; apart < kWarp; apart *= 2) {
        if (apart >= lanes) break;
#pragma unroll
        for (float& logit : own) logit += __shfl_xor_sync(kAllLanes, logit, apart);
      }
      const float shrink = weigh(own, changed, own_head, round + team + own_row * n_teams, end,
                                 n_heads, logits + own_head * stride);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float factor = __shfl_sync(kAllLanes, shrink, h * kPerHead, kSpread);
#pragma unroll
        for (int c = 0; c < kOctets; ++c) {
#pragma unroll
          for (int j = 0; j < 8; ++j) out[h][c].x[j] *= factor;
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          p[h * kAhead + i] =
              __shfl_sync(kAllLanes, own[i % kOwn], h * kPerHead + i / kOwn, kSpread);
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int c = 0; c < kOctets; ++c) {
          const Octet value = rows.unpack_value(v[i][c]);
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            float weight = p[h * kAhead + i];
            if constexpr (Rows::kScaled) weight *= rows.value_scale(v[i][c]);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              out[h][c].x[j] = fmaf(weight, value.x[j], out[h][c].x[j]);
            }
          }
        }
      }
      if (round + per_round < end) load_values(round + per_round);
    }
  }

  // Changes the thread's logits, of a head and of every n_teams-th slot from `first` on, stores
  // them in `logits`, and replaces them by their weights. Returns the factor of the sums so far.
  __device__ __forceinline__ float weigh(float (&own)[kOwn], const SlotLogits& changed, int head,
                                         int first, int end, int n_heads, float* logits) {
    float most = largest;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int slot = first + i * n_teams;
      if (changed.changes.any()) {
        own[i] = changed(own[i], min(head, n_heads - 1), min(slot, end - 1));
      }
      if (slot >= end) continue;
      most = fmaxf(most, own[i]);
      if (lane < kSpread && head < n_heads) logits[slot] = own[i];
    }
#pragma unroll
    for (int apart = 1; apart < kPerHead; apart *= 2) {
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, apart));
    }
    const float shrink = exp_negative(largest - most);
    largest = most;
    total *= shrink;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own[i] = first + i * n_teams < end ? exp_negative(own[i] - most) : 0;
      total += own[i];
    }
    return shrink;
  }

  // Merges the teams of the block, in order, into out [n_heads, n_splits, head_dim] and the softmax
  // of each head. Teams write sequentially. `shared`: see shared_bytes().
  __device__ void merge(float* shared, const Partials& partials, int split_index, int64_t query,
                        int n_heads, int head_dim) const {
    const int width = lanes * kOctets * 8;
    float* const sums = shared + n_teams * kHeads * 2;  // [n_teams, kHeads, width]
    const float all = warp_sum<kPerHead>(total);
    if (lane < kSpread && lane % kPerHead == 0) {
      float* const softmax = shared + 2 * (team * kHeads + lane / kPerHead);
      softmax[0] = largest;
      softmax[1] = all;
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int mine = team * kHeads + h;
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
  // The largest logit of the thread's head so far, and the sum of the thread's weights.
  float largest, total;
};

}  // namespace h2o::cuda
