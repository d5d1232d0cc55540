// How the threads of decode attention read keys and values.
#pragma once

#include "backend/batch.h"
#include "cuda/attention/kv_types.cuh"
#include "cuda/attention/logit_changes.cuh"
#include "kv/view.h"

namespace h2o::cuda {

struct Decode {
  const float* q;  // [n, n_heads * head_dim]
  float* out;      // like q
  float scale;
  int32_t half;  // n_rot / 2 of rolling sequences
  bool pairs;
  // For Single: segments that other kernels handle, because they can read whole rows.
  bool whole_fixed;
  bool whole_rolling;
  LogitChanges changes;
  int32_t in_use;   // at least as many slots as a segment of one row has in use, or kMostInUse
  int32_t n_pools;  // (segment, kv_head)
  bool reads;       // keys that an earlier layer stored in this pass, when scores decayed
  bool evicts;      // see Attention
};

// How a thread reads its part of the keys and values: eight elements at a time, kAhead<n> rows
// before the first is used, by n query heads, at most kMostHeads. blocks(n): the minimum per
// multiprocessor; few enough that the rows which a thread prefetches stay in registers. handles():
// which segments. kScaled: what is unpacked has to be multiplied by key_scale() and value_scale().

// Whole: octets of a type known at compile time.
template <class KeyRow, class ValueRow = KeyRow>
struct Whole {
  // At a time: with more, the rows of a long type leave no registers for the rows read ahead.
  static constexpr int kMostHeads = sizeof(typename KeyRow::Packed) > 16 ? 4 : 8;
  static constexpr int blocks(int heads) { return heads > 4 ? 2 : heads > 1 ? 3 : 5; }
  template <int heads>
  static constexpr int kAhead = sizeof(typename KeyRow::Packed) > 16 ? 2 : 4;
  using Key = typename KeyRow::Packed;
  using Value = typename ValueRow::Packed;
  // Bytes of 32 elements of a key and value, and operations to unpack eight.
  static constexpr int kBlockBytes = KeyRow::kBlockBytes + ValueRow::kBlockBytes;
  static constexpr int kUnpack = KeyRow::kUnpack + ValueRow::kUnpack;
  static constexpr bool kScaled = KeyRow::kScaled || ValueRow::kScaled;
  const KvView& cache;
  const KvHead& head;

  __device__ Whole(const KvView& cache, const KvHead& head, const Decode&, bool)
      : cache(cache), head(head) {}
  static __device__ bool handles(const Segment& segment, const Decode&) { return !segment.rolling; }

  __device__ Key key(int slot, int i) const {
    return KeyRow::load(head.k + slot * cache.k_row_bytes, inside(i));
  }
  __device__ Value value(int slot, int i) const {
    return ValueRow::load(head.v + slot * cache.v_row_bytes, inside(i));
  }
  // Past the end the last octet is repeated: the query is zero there, and its output is not stored.
  __device__ int inside(int i) const { return min(i, cache.head_dim - 8); }
  static __device__ Octet unpack_key(const Key& key, int) { return KeyRow::unpack(key); }
  static __device__ Octet unpack_value(const Value& value) { return ValueRow::unpack(value); }
  static __device__ float key_scale(const Key& key) { return KeyRow::scale(key); }
  static __device__ float value_scale(const Value& value) { return ValueRow::scale(value); }
};

// Are pairs of elements rotated in whole octets?
inline bool turns_whole_octets(int half, bool pairs) { return half % (pairs ? 4 : 8) == 0; }

// Rolled: the same for rolling segments, whose keys are rotated when read. With a layout of halves,
// another thread of the team has the other elements of an octet's pairs; both read them from the
// cache, where the second finds them in L1. Only if turns_whole_octets().
template <class KeyRow, class ValueRow = KeyRow>
struct Rolled {
  static constexpr int kMostHeads = 4;  // angles take registers
  static constexpr int blocks(int heads) {
    const int most = heads == 1 ? 4 : 3;
    return sizeof(typename ValueRow::Packed) < 16 ? most - 1 : most;
  }
  template <int heads>
  static constexpr int kAhead = sizeof(typename KeyRow::Packed) > 16 ? 1 : 2;
  struct Key {
    typename KeyRow::Packed own, other;
    float4 cosines[2], sines[2];  // in pairs, only the first four
  };
  using Value = typename ValueRow::Packed;
  static constexpr int kBlockBytes = KeyRow::kBlockBytes + ValueRow::kBlockBytes;
  static constexpr int kUnpack = 2 * KeyRow::kUnpack + 24 + ValueRow::kUnpack;  // and to rotate
  static constexpr bool kScaled = false;
  const KvView& cache;
  const KvHead& head;
  const int half;
  const bool pairs;

  __device__ Rolled(const KvView& cache, const KvHead& head, const Decode& decode, bool)
      : cache(cache), head(head), half(decode.half), pairs(decode.pairs) {}
  static __device__ bool handles(const Segment& segment, const Decode&) { return segment.rolling; }

  __device__ Key key(int slot, int i) const {
    const std::byte* const row = head.k + slot * cache.k_row_bytes;
    i = min(i, cache.head_dim - 8);
    Key key;
    key.own = KeyRow::load(row, i);
    if (i >= 2 * half) return key;
    const float* const angles = cache.rope_table + int64_t{head.ranks[slot]} * 2 * half;
    const int pair = pairs ? i / 2 : i < half ? i : i - half;
    const auto load = [&](const float* from, float4* to) {
      to[0] = *reinterpret_cast<const float4*>(from + pair);
      if (!pairs) to[1] = *reinterpret_cast<const float4*>(from + pair + 4);
    };
    load(angles, key.cosines);
    load(angles + half, key.sines);
    if (!pairs) key.other = KeyRow::load(row, i < half ? i + half : i - half);
    return key;
  }
  __device__ Value value(int slot, int i) const {
    return ValueRow::load(head.v + slot * cache.v_row_bytes, min(i, cache.head_dim - 8));
  }
  __device__ Octet unpack_key(const Key& key, int i) const {
    Octet own = unpack_scaled<KeyRow>(key.own);
    if (min(i, cache.head_dim - 8) >= 2 * half) return own;
    const auto& [c0, c1] = key.cosines;
    const auto& [s0, s1] = key.sines;
    const float c[8] = {c0.x, c0.y, c0.z, c0.w, c1.x, c1.y, c1.z, c1.w};
    const float s[8] = {s0.x, s0.y, s0.z, s0.w, s1.x, s1.y, s1.z, s1.w};
    if (pairs) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float first = own.x[2 * j], second = own.x[2 * j + 1];
        own.x[2 * j] = first * c[j] - second * s[j];
        own.x[2 * j + 1] = second * c[j] + first * s[j];
      }
    } else {
      const Octet other = unpack_scaled<KeyRow>(key.other);
      const float sign = i < half ? -1.0f : 1.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) own.x[j] = own.x[j] * c[j] + sign * other.x[j] * s[j];
    }
    return own;
  }
  static __device__ Octet unpack_value(const Value& value) {
    return unpack_scaled<ValueRow>(value);
  }
};

// Single: any type and head_dim, one element at a time, when it is needed; keys of a rolling
// segment are rotated. Not meant to be fast, but short: code for every type takes long to compile.
struct Single {
  static constexpr int kMostHeads = 4;
  static constexpr int blocks(int heads) { return heads > 1 ? 3 : 4; }
  template <int heads>
  static constexpr int kAhead = 1;
  static constexpr bool kScaled = false;
  struct Place {
    int slot, i;
  };
  using Key = Place;
  using Value = Place;

  __device__ Single(const KvView& cache, const KvHead& head, const Decode& decode, bool rolling)
      : cache(cache), head(head), half(rolling ? decode.half : 0), pairs(decode.pairs) {}
  static __device__ bool handles(const Segment& segment, const Decode& decode) {
    return segment.rolling ? !decode.whole_rolling : !decode.whole_fixed;
  }

  static __device__ Place key(int slot, int i) { return {slot, i}; }
  static __device__ Place value(int slot, int i) { return {slot, i}; }
  __device__ Octet unpack_key(const Place& at, int) const {
    const float* angles =
        half > 0 ? cache.rope_table + int64_t{head.ranks[at.slot]} * 2 * half : nullptr;
    return read(cache.k_dtype, head.k + at.slot * cache.k_row_bytes, at.i, angles, half);
  }
  __device__ Octet unpack_value(const Place& at) const {
    return read(cache.v_dtype, head.v + at.slot * cache.v_row_bytes, at.i, nullptr, 0);
  }

 private:
  // `angles`: the row of the rope table by which pairs of the first 2 * half elements are rotated.
  __device__ Octet read(DType dtype, const std::byte* row, int i, const float* angles,
                        int half) const {
    asm volatile("" : "+r"(i));  // else what depends on it is found once, and kept in local memory
    Octet o;
    with_row(dtype, [&]<class Row>(Row) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int e = i + j;
        o.x[j] = e < cache.head_dim ? Row::one(row, e) : 0;
        if (e < 2 * half) o.x[j] = rotated<Row>(o.x[j], row, e, angles);
      }
    });
    return o;
  }
  template <class Row>
  __device__ float rotated(float x, const std::byte* row, int e, const float* angles) const {
    const bool second = pairs ? e % 2 == 1 : e >= half;
    const int pair = pairs ? e / 2 : second ? e - half : e;
    const int apart = pairs ? 1 : half;
    const float other = Row::one(row, second ? e - apart : e + apart);
    return second ? other * angles[half + pair] + x * angles[pair]
                  : x * angles[pair] - other * angles[half + pair];
  }

  const KvView& cache;
  const KvHead& head;
  const int half;  // 0: nothing is rotated
  const bool pairs;
};

}  // namespace h2o::cuda
