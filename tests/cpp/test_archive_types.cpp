// Keys in q3 and values in q2, the types that only an archive has.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "archive_rig.h"
#include "attention_check.h"
#include "kv/serialized_sequence.h"

namespace h2o {
namespace {

constexpr int64_t kHeadDim = 64;

// Keys as a model has them: each dimension has a center and a range of its own.
std::vector<float> random_keys(Random& random, int64_t n) {
  std::vector<float> centers = random.reals(kHeadDim, -20, 20);
  std::vector<float> keys(n * kHeadDim);
  for (int64_t t = 0; t < n; ++t) {
    for (int64_t i = 0; i < kHeadDim; ++i) {
      const float range = std::ldexp(1.0f, static_cast<int>(i % 8) - 4);
      keys[t * kHeadDim + i] = (i % 3 == 0 ? centers[i] : 0) + range * random.real(-1, 1);
    }
  }
  return keys;
}

float largest_of(const std::vector<float>& x) { return *std::max_element(x.begin(), x.end()); }
float smallest_of(const std::vector<float>& x) { return *std::min_element(x.begin(), x.end()); }

// The values of KeyGrid and the codes. They are divided and rounded once, like them: results are
// exact.
std::vector<float> expected_keys(const std::vector<float>& keys) {
  std::vector<float> expected(keys.size());
  for (int64_t i = 0; i < kHeadDim; ++i) {
    std::vector<float> column;
    for (size_t t = i; t < keys.size(); t += kHeadDim) column.push_back(keys[t]);
    // A multiple of one of 8 bits: that of the next power of two, divided by 256.
    const float smallest = smallest_of(column);
    const float unit = std::ldexp(1.0f, std::ilogb(smallest) - 7);
    const float lowest = std::floor(smallest / unit) * unit;
    const float range = (largest_of(column) - lowest) / 7;
    const float eighth = std::ldexp(1.0f, std::ilogb(range) - 3);
    const float step = std::ceil(range / eighth) * eighth;
    for (size_t t = i; t < keys.size(); t += kHeadDim) {
      const float code = std::clamp(std::floor((keys[t] - lowest) / step + 0.5f), 0.0f, 7.0f);
      expected[t] = lowest + step * code;
    }
  }
  return expected;
}

std::vector<float> expected_values(const std::vector<float>& values) {
  std::vector<float> expected;
  for (auto x = values.begin(); x != values.end(); x += 64) {
    const std::vector<float> block(x, x + 64);
    const float smallest = std::min(smallest_of(block), 0.0f);
    const float range = (std::max(largest_of(block), 0.0f) - smallest) / 3;
    const float eighth = std::ldexp(1.0f, std::ilogb(range) - 3);
    const float step = std::ceil(range / eighth) * eighth;
    const float zero = std::floor(-64 * smallest / step + 0.5f) / 64;
    for (const float value : block) {
      expected.push_back(step *
                         (std::clamp(std::floor(value / step + zero + 0.5f), 0.0f, 3.0f) - zero));
    }
  }
  return expected;
}

TEST_CASE("keys in q3 have a grid of eight levels for each dimension of a page") {
  Random random(1);
  const CpuKernels& kernels = choose_kernels("scalar");
  for (int trial = 0; trial < 20; ++trial) {
    const std::vector<float> keys = random_keys(random, 32);
    const std::vector<float> expected = expected_keys(keys);
    std::vector<float> largest(keys.begin(), keys.begin() + kHeadDim), smallest = largest;
    for (size_t i = kHeadDim; i < keys.size(); ++i) {
      largest[i % kHeadDim] = std::max(largest[i % kHeadDim], keys[i]);
      smallest[i % kHeadDim] = std::min(smallest[i % kHeadDim], keys[i]);
    }
    std::vector<std::byte> memory(KeyGrid::bytes(kHeadDim));
    const KeyGrid grid(memory.data(), kHeadDim);
    grid.fit(smallest.data(), largest.data());
    std::vector<float> bounds(2 * kHeadDim);
    grid.bounds(bounds.data());
    std::vector<std::byte> row(byte_size(DType::q3, kHeadDim));
    std::vector<float> codes(kHeadDim);
    for (size_t t = 0; t < keys.size(); t += kHeadDim) {
      grid.to_codes(keys.data() + t, codes.data());
      kernels.q3.encode(row.data(), codes.data(), kHeadDim);
      kernels.q3.decode(codes.data(), row.data(), kHeadDim);
      for (int64_t i = 0; i < kHeadDim; ++i) {
        const float step = (bounds[i] - bounds[kHeadDim + i]) / 7;
        const float key = bounds[kHeadDim + i] + step * codes[i];
        CHECK(key == doctest::Approx(expected[t + i]).epsilon(1e-5));
        CHECK(std::abs(key - keys[t + i]) <= step * 0.5001f);
        CHECK(bounds[kHeadDim + i] <= keys[t + i]);
        CHECK(bounds[i] >= keys[t + i]);
      }
    }
  }
}

TEST_CASE("values in q2 are within half a step, of every size") {
  Random random(2);
  for (const CpuKernels* table : supported_kernels()) {
    CAPTURE(std::string_view(table->isa));
    for (int trial = 0; trial < 50; ++trial) {
      const float size = std::ldexp(1.0f, random.integer(-12, 11));
      const float low = trial % 5 == 0 ? 0.25f : trial % 5 == 1 ? -0.01f : -1;
      const std::vector<float> values = random.reals(128, low * size, size);
      std::vector<std::byte> row(byte_size(DType::q2, 128));
      std::vector<float> decoded(128);
      table->q2.encode(row.data(), values.data(), 128);
      table->q2.decode(decoded.data(), row.data(), 128);
      const std::vector<float> expected = expected_values(values);
      for (int i = 0; i < 128; ++i) CHECK(decoded[i] == expected[i]);
    }
  }
  // Limits: zeros, and what no step reaches.
  for (const float value : {0.0f, 1e30f, -1e30f, INFINITY, NAN}) {
    const std::vector<float> values(64, value);
    std::vector<std::byte> row(byte_size(DType::q2, 64));
    std::vector<float> decoded(64);
    const TypeKernels& q2 = choose_kernels("scalar").q2;
    q2.encode(row.data(), values.data(), 64);
    q2.decode(decoded.data(), row.data(), 64);
    if (value == 0) CHECK(decoded == values);
    for (const float x : decoded) CHECK(std::isfinite(x));
  }
}

// Tokens leave the cache in order; `recent` covers a page.
constexpr KvPolicy kRing{.sinks = 2, .heavy = 0, .recent = 40};

KvShape small_shape(int32_t n_sequences = 1) {
  KvShape shape = shape_with(DType::f32, kHeadDim, 1000, n_sequences);
  shape.archive.k_dtype = DType::q3;
  shape.archive.v_dtype = DType::q2;
  return shape;
}

// In place of random_qkv's.
Qkv model_like(Random& random, const KvShape& shape, int64_t n) {
  Qkv in = random_qkv(random, shape, n);
  for (int64_t i = 0; i < std::ssize(in.k); ++i) {
    if (i % kHeadDim % 5 == 0) in.k[i] = in.k[i] / 4 + 3;
  }
  return in;
}

TEST_CASE("attention to an archive in q3 and q2 is that to the keys and values of its codes") {
  const KvShape shape = small_shape();
  for (const int n_threads : {1, 3}) {
    Rig rig(kRing, shape, n_threads);
    Random random(3);
    Qkv all;
    const int32_t n_tokens = 350;
    std::vector<float> out;
    Qkv last;
    for (const int32_t n : mixed_steps(n_tokens)) {
      last = model_like(random, shape, n);
      all = joined(std::move(all), last);
      out = rig.attend({{0, n}}, last);
    }
    const int32_t n_last = static_cast<int32_t>(std::ssize(last.q) / (4 * kHeadDim));
    const int32_t n_before = n_tokens - n_last;  // which the last step found
    const int32_t group = shape.n_heads / shape.n_kv_heads;
    KvShape full = shape;
    full.archive = {};
    for (int32_t kv_head = 0; kv_head < shape.n_kv_heads; ++kv_head) {
      std::vector<float> k = heads_of(all.k, n_tokens, shape.n_kv_heads, kv_head, 1, kHeadDim);
      std::vector<float> v = heads_of(all.v, n_tokens, shape.n_kv_heads, kv_head, 1, kHeadDim);
      for (int32_t first = 0; first < n_before - kRing.recent; first += 32) {
        const auto begin = k.begin() + first * kHeadDim;
        const std::vector<float> keys = expected_keys({begin, begin + 32 * kHeadDim});
        for (int32_t t = first; t < std::min(first + 32, n_before - kRing.recent); ++t) {
          if (t < kRing.sinks) continue;
          const auto at = t * kHeadDim;
          std::copy_n(keys.begin() + (t - first) * kHeadDim, kHeadDim, k.begin() + at);
          const std::vector<float> value =
              expected_values({v.begin() + at, v.begin() + at + kHeadDim});
          std::copy(value.begin(), value.end(), v.begin() + at);
        }
      }
      ReferenceHead reference(KvPolicy(), full);
      const auto rows = [](const std::vector<float>& x, int64_t begin, int64_t end) {
        return std::vector<float>(x.begin() + begin * kHeadDim, x.begin() + end * kHeadDim);
      };
      reference.step(n_before, std::vector<float>(n_before * group * kHeadDim),
                     rows(k, 0, n_before), rows(v, 0, n_before), true);
      const ReferenceHead::Output expected = reference.step(
          n_last, heads_of(last.q, n_last, shape.n_heads, kv_head * group, group, kHeadDim),
          rows(k, n_before, n_tokens), rows(v, n_before, n_tokens), n_last > 1);
      const std::vector<float> actual =
          heads_of(out, n_last, shape.n_heads, kv_head * group, group, kHeadDim);
      double worst = 0;
      for (size_t i = 0; i < actual.size(); ++i) {
        // The sum over codes and the lowest keys are rounded apart: twice the reference's bound.
        worst = std::max(worst, in_bounds(actual[i], expected.value[i], 2 * expected.bound[i]));
      }
      CHECK(worst <= 1);
      CHECK(worst > 0);
    }
  }
}

TEST_CASE("an archive in q3 and q2 depends neither on steps, threads nor other sequences") {
  KvShape shape = small_shape(2);
  KvShape alone = small_shape();
  alone.archive.n_recalled = shape.archive.n_recalled = 3;
  Rig one(kRing, alone), many(kRing, shape, 4), singly(kRing, alone);
  Random random(4);
  for (const int32_t n : mixed_steps(300)) {
    const Qkv in = model_like(random, shape, n);
    const Qkv both = joined(model_like(random, shape, 2), in);
    const std::vector<float> expected = one.attend({{0, n}}, in);
    std::vector<float> out = many.attend({{0, 2}, {1, n}}, both);
    out.erase(out.begin(), out.end() - std::ssize(expected));
    CHECK(same_bits(expected, out));
    singly.attend_singly(0, n, in);
  }
  // Pages have the same rows, in another order: sums of values up to 1 are rounded differently.
  const Qkv in = model_like(random, shape, 1);
  const std::vector<float> a = one.attend({{0, 1}}, in), b = singly.attend({{0, 1}}, in);
  for (size_t i = 0; i < a.size(); ++i) CHECK(std::abs(a[i] - b[i]) <= 2 * gamma(301));

  // Bytes: 3 bits and 24 bits / 32 per element of a key, 2 bits and 16 bits / 64 of a value.
  const int64_t n_archived = 301 - 42;
  const int64_t pages = (n_archived + 2 + 31) / 32;
  CHECK(one.cache().archive_bytes() == 2 * (n_archived * (24 + 18) + pages * 3 * kHeadDim));

  const std::vector<std::byte> bytes = bytes_of(one);
  Rig restored(kRing, alone);
  ByteReader reader("the sequence", bytes);
  read_sequence(restored.cache(), 0, one.cache().length(0), reader);
  CHECK(bytes_of(restored) == bytes);
  const Qkv next = model_like(random, shape, 1);
  CHECK(same_bits(one.attend({{0, 1}}, next), restored.attend({{0, 1}}, next)));
}

}  // namespace
}  // namespace h2o
