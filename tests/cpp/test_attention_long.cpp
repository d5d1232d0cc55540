// Attention over many keys and of long chunks, with realistic head shapes, compared with the
// reference: where a device splits keys over blocks, and tiles rows for tensor cores.
#include <array>

#include "archive_rig.h"
#include "attention_check.h"
#include "cpu/cpu_backend.h"
#include "device_pair.h"

namespace h2o {
namespace {

constexpr KvPolicy kFull{};
constexpr KvPolicy kSinks{.sinks = 4, .heavy = 0, .recent = 60};
constexpr KvPolicy kH2o{.sinks = 2, .heavy = 90, .recent = 70};
constexpr KvPolicy kHeavy{.sinks = 0, .heavy = 37, .recent = 0};

KvShape shape_of(int32_t head_dim, int32_t group, DType dtype) {
  return {.n_layers = 1,
          .n_sequences = 2,
          .n_heads = 2 * group,
          .n_kv_heads = 2,
          .head_dim = head_dim,
          .max_tokens = 600,
          .max_rows = 180,
          .k_dtype = dtype,
          .v_dtype = dtype};
}

// Chunks shorter and longer than tiles of 16, 64 and 128 rows, and single rows between them.
std::vector<Piece> long_pieces(Random& random, const KvCache& cache) {
  constexpr int32_t kRows[] = {1, 2, 15, 16, 17, 63, 65, 130, 179};
  const int32_t n = std::min(kRows[random.integer(0, 8)], cache.room(0));
  const int32_t other = std::min(random.integer(0, 1), cache.room(1));
  std::vector<Piece> pieces;
  if (other > 0) pieces.push_back({1, other});
  if (n > 0) pieces.push_back({0, n});
  return pieces;
}

TEST_CASE("chunks of every size of head, group and type") {
  Totals totals;
  uint64_t seed = 0;
  for (const int32_t head_dim : {32, 64, 80, 96, 128, 256}) {
    for (const DType dtype :
         {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q5_0, DType::q4_0}) {
      if (on_cuda() && dtype == DType::q5_0) continue;  // not supported
      if (head_dim % info(dtype).block_size != 0) continue;
      Random random(++seed);
      if (brief() && seed % 5 > 1) continue;  // of all groups and policies
      constexpr int32_t kGroups[] = {1, 2, 3, 4, 7, 8};
      const KvPolicy policy = std::array{kFull, kSinks, kH2o, kHeavy}[seed % 4];
      const KvShape shape = shape_of(head_dim, kGroups[seed % 6], dtype);
      check_against_reference(random, policy, shape, 4, long_pieces, totals);
    }
  }
  CHECK(totals.n_outputs > 1'000'000);
  CHECK(totals.n_evictions > 1'000);
}

TEST_CASE("K and V of two types") {
  for (const auto& [k, v] :
       {std::pair(DType::f16, DType::q8_0), std::pair(DType::q8_0, DType::q4_0)}) {
    Totals totals;
    Random random(7);
    KvShape shape = shape_of(64, 4, k);
    shape.v_dtype = v;
    check_against_reference(random, kH2o, shape, 5, long_pieces, totals);
  }
}

// Whole rows, where the device has kernels for them; with 96 elements some lanes are past the end.
TEST_CASE("decoding in every type") {
  Totals totals;
  Random random(9);
  int32_t group = 0;
  for (const DType k : {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0}) {
    for (const DType v : {k, DType::q4_0}) {
      for (const int32_t head_dim : {32, 96}) {
        CAPTURE(info(k).name);
        CAPTURE(info(v).name);
        CAPTURE(head_dim);
        group = group % 5 + 1;
        KvShape shape = shape_of(head_dim, group, k);
        shape.v_dtype = v;
        int32_t next = 36;
        const auto pieces = [&](Random&, const KvCache&) {
          return std::vector<Piece>{{0, std::exchange(next, 1)}};
        };
        check_against_reference(random, kHeavy, shape, 8, pieces, totals);
      }
    }
  }
  CHECK(totals.n_evictions > 100);
}

// Keys are rotated when read: compared with the scalar CPU, whose cache has the same bits. A logit
// is the sum of up to 96 products below 1 / sqrt(96), each with fewer than 16 roundings: it is off
// by at most 9.8 * (96 + 16) * 2^-24 < 1e-4 on either side, and outputs, below 1, by 4 times that.
TEST_CASE("decoding with rolling positions in every type" * doctest::skip(!on_gpu())) {
  const auto check = [](DType k, DType v, int32_t head_dim, const Rope& rope, int32_t group) {
    CAPTURE(info(k).name);
    CAPTURE(info(v).name);
    CAPTURE(head_dim);
    CAPTURE(rope.frequencies.cols);
    KvShape shape = shape_of(head_dim, group, k);
    shape.v_dtype = v;
    shape.rope = rope;
    const KvPolicy policy{.sinks = 2, .heavy = 0, .recent = 70};
    Rig device(policy, shape), cpu(make_cpu_backend(1, "scalar"), {&policy, 1}, shape);
    Random random(13);
    for (const int32_t n : {71, 1, 1, 1}) {
      const Qkv in = random_qkv(random, shape, n);
      const std::vector<float> a = device.attend({{0, n}}, in), b = cpu.attend({{0, n}}, in);
      double worst = 0;
      for (size_t i = 0; i < a.size(); ++i) {
        const double off = std::abs(double{a[i]} - b[i]);
        worst = off <= worst ? worst : off;  // or NaN
      }
      if (n == 1) CHECK(worst <= 4e-4);
      CHECK(same_entries(device, 0, cpu, 0, shape.n_kv_heads));
    }
  };
  int32_t group = 0;
  for (const auto& [k, v] :
       {std::pair(DType::f32, DType::f32), std::pair(DType::f16, DType::f16),
        std::pair(DType::bf16, DType::bf16), std::pair(DType::q8_0, DType::q8_0),
        std::pair(DType::q8_0, DType::q4_0), std::pair(DType::q4_0, DType::q4_0)}) {
    for (const int32_t head_dim : {32, 96}) {
      // All of a head, a part, and a part without whole octets.
      for (const int32_t n_rot : {head_dim, 16, 12}) {
        Rope rope = rope_of(n_rot);
        for (const RopeLayout layout : {RopeLayout::halves, RopeLayout::pairs}) {
          rope.layout = layout;
          group = group % 5 + 1;
          check(k, v, head_dim, rope, group);
        }
      }
    }
  }
}

// Splits get longer with the slots in use, and with the number of heads and sequences: here 128,
// 128, 256 and 512. Compared with the CPU, which has read the tokens. Logits are below 4, and sums
// of 16 products, outputs below 1: both are off by less than 1e-4, as above; a split that is
// missing changes them by more.
TEST_CASE("decoding with splits of every length" * doctest::skip(!on_cuda())) {
  struct Case {
    int32_t n_kv_heads, group, n_tokens;
  };
  for (const auto [n_kv_heads, group, tokens] :
       {Case{1, 2, 9000}, Case{32, 4, 1700}, Case{128, 1, 850}, Case{256, 1, 850}}) {
    const int32_t n_tokens = tokens;  // clang 14 captures no structured binding
    CAPTURE(n_tokens);
    const KvShape shape{.n_sequences = 2,
                        .n_heads = n_kv_heads * group,
                        .n_kv_heads = n_kv_heads,
                        .head_dim = 16,
                        .max_tokens = n_tokens + 1,
                        .max_rows = n_tokens,
                        .k_dtype = DType::f16,
                        .v_dtype = DType::f16};
    const KvPolicy policy{.sinks = 0, .heavy = n_tokens / 2, .recent = n_tokens - n_tokens / 2};
    Rig device(policy, shape), cpu(make_backend("cpu", 1), {&policy, 1}, shape);
    Random random(14);
    Qkv in = random_qkv(random, shape, n_tokens);
    cpu.attend({{0, n_tokens}}, in);
    cpu.attend({{1, n_tokens}}, in);
    const std::vector<std::byte> bytes = bytes_of(cpu);
    for (int32_t sequence = 0; sequence < 2; ++sequence) {
      ByteReader reader("the sequence", bytes);
      read_sequence(device.cache(), sequence, n_tokens, reader);
    }
    in = random_qkv(random, shape, 2);
    const std::vector<float> a = device.attend({{0, 1}, {1, 1}}, in),
                             b = cpu.attend({{0, 1}, {1, 1}}, in);
    double worst = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      const double off = std::abs(double{a[i]} - b[i]);
      worst = off <= worst ? worst : off;  // or NaN
    }
    CHECK(worst <= 1e-4);
    for (int32_t sequence = 0; sequence < 2; ++sequence) {
      CHECK(close_entries(device.entries(sequence, 0), cpu.entries(sequence, 0), 1e-4));
    }
  }
}

// Longer rows than the device reads whole: an element at a time.
TEST_CASE("decoding heads of more than 256 elements") {
  Totals totals;
  Random random(10);
  for (const auto& kind : {std::pair(259, DType::f32), std::pair(320, DType::q8_0),
                           std::pair(512, DType::q4_0), std::pair(1000, DType::f16)}) {
    const int head_dim = kind.first;
    const DType dtype = kind.second;
    CAPTURE(head_dim);
    int32_t next = 36;
    const auto pieces = [&](Random&, const KvCache&) {
      return std::vector<Piece>{{0, std::exchange(next, 1)}};
    };
    check_against_reference(random, kHeavy, shape_of(head_dim, 3, dtype), 6, pieces, totals);
  }
  CHECK(totals.n_evictions > 20);
}

// A device splits the keys of a short chunk over blocks, also where the chunk begins within a
// split.
TEST_CASE("short chunks over many keys") {
  const KvPolicy evicting{.sinks = 3, .heavy = 200, .recent = 150};
  int32_t n_sinks = 0;
  for (const auto& [dtype, head_dim] :
       {std::pair(DType::f16, 64), std::pair(DType::q8_0, 64), std::pair(DType::f32, 20)}) {
    for (const KvPolicy& policy : {kFull, evicting}) {
      Totals totals;
      Random random(11);
      KvShape shape = shape_of(head_dim, 3, dtype);
      shape.n_heads = 3;
      shape.n_kv_heads = 1;
      shape.max_rows = 300;
      LogitRules rules{.softcap = 2};
      if (++n_sinks % 2 == 0) rules.sinks = {0.5f, -3, 4};
      const int32_t rows[] = {290, 16, 130, 2, 1, 9};
      int step = 0;
      const auto pieces = [&](Random&, const KvCache&) {
        return std::vector<Piece>{{0, rows[step++]}};
      };
      check_against_reference(random, policy, shape, 6, pieces, totals, rules);
      CHECK(totals.n_evictions == (policy.heavy > 0 ? 448 - 353 : 0));
    }
  }
}

TEST_CASE("a short chunk over many keys does not depend on the rest of the batch") {
  KvShape shape = shape_of(64, 2, DType::f16);
  shape.max_rows = 300;
  const KvPolicy policy{.sinks = 0, .heavy = 340, .recent = 5};
  Rig alone(policy, shape), together(policy, shape);
  Random random(12);
  const int64_t width = shape.n_heads * shape.head_dim;
  for (const int32_t n : {290, 16, 2, 80}) {
    const Qkv in = random_qkv(random, shape, n + 7);
    const std::vector<float> out = alone.attend({{0, n}}, in.rows(shape, 0, n));
    std::vector<float> both = together.attend({{0, n}, {1, 7}}, in);
    both.resize(n * width);
    CHECK(same_bits(out, both));
    CHECK(same_entries(alone, 0, together, 0, shape.n_kv_heads));
  }
}

TEST_CASE("decoding does not depend on the size of the cache") {
  KvShape shape = shape_of(64, 1, DType::f16);
  shape.max_rows = 150;
  shape.max_tokens = 160;
  Rig small(kFull, shape);
  shape.max_tokens = 20'000;
  Rig large(kFull, shape);
  Random random(13);
  for (const int32_t n : {150, 1, 1}) {
    const Qkv in = random_qkv(random, shape, n);
    CHECK(same_bits(small.attend({{0, n}}, in), large.attend({{0, n}}, in)));
    CHECK(same_entries(small, 0, large, 0, shape.n_kv_heads));
  }
}

// A few thousand keys: many times what a block reads.
TEST_CASE("decoding with many keys") {
  for (const KvPolicy& policy : {kFull, KvPolicy{.sinks = 4, .heavy = 1500, .recent = 700}}) {
    if (brief() && policy.heavy != 1500) continue;
    Totals totals;
    Random random(8);
    KvShape shape = shape_of(64, 2, DType::f16);
    shape.n_kv_heads = 1;
    shape.n_heads = 3;
    shape.max_tokens = 3000;
    shape.max_rows = 1300;
    int step = 0;
    const auto pieces = [&](Random&, const KvCache&) -> std::vector<Piece> {
      if (++step == 1) return {{0, 1300}};
      if (step == 2) return {{0, 1000}};
      return {{0, 1}, {1, 1}};
    };
    check_against_reference(random, policy, shape, 8, pieces, totals);
  }
}

}  // namespace
}  // namespace h2o
