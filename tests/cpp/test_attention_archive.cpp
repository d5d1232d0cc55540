// Attention with an archive: evicted tokens are recalled by pages.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "allocations.h"
#include "archive_rig.h"
#include "attention_check.h"
#include "core/error.h"
#include "kv/serialized_sequence.h"

namespace h2o {
namespace {

void check_all_pages(DType dtype, int32_t head_dim, int n_threads, const LogitRules& rules = {}) {
  CAPTURE(info(dtype).name);
  CAPTURE(n_threads);
  CAPTURE(head_dim);
  const KvShape shape = shape_with(dtype, head_dim, 1000);
  Rig rig(kPolicy, shape, n_threads);
  rig.set_logits(rules);
  const int32_t group = shape.n_heads / shape.n_kv_heads;
  std::vector<ReferenceHead> heads;
  for (int32_t first = 0; first < shape.n_heads; first += group) {
    heads.emplace_back(KvPolicy(), shape, rules.of_heads(first, first + group));
  }
  Random random(7);
  double worst = 0;
  double worst_score = 0;
  const int32_t n_tokens = brief() ? 200 : 350;
  for (const int32_t n : mixed_steps(n_tokens)) {
    const Qkv in = random_qkv(random, shape, n);
    const std::vector<float> out = rig.attend({{0, n}}, in);
    for (int32_t kv_head = 0; kv_head < shape.n_kv_heads; ++kv_head) {
      const auto part = [&](const std::vector<float>& x, int64_t all, int64_t count) {
        return heads_of(x, n, all, kv_head * count, count, shape.head_dim);
      };
      const ReferenceHead::Output expected =
          heads[kv_head].step(n, part(in.q, shape.n_heads, group), part(in.k, shape.n_kv_heads, 1),
                              part(in.v, shape.n_kv_heads, 1), n > 1);
      const std::vector<float> actual = part(out, shape.n_heads, group);
      REQUIRE(actual.size() == expected.value.size());
      for (size_t i = 0; i < actual.size(); ++i) {
        worst = std::max(worst, in_bounds(actual[i], expected.value[i], expected.bound[i]));
      }
      // The attention that the kept tokens receive is what remains after all others.
      for (const KvEntry& entry : rig.entries(0, kv_head)) {
        const Kept& kept = heads[kv_head].kept()[entry.position];
        worst_score = std::max(worst_score, in_bounds(entry.score, kept.score, kept.score_error()));
      }
    }
  }
  CHECK(worst <= 1);
  CHECK(worst > 0);
  CHECK(worst_score <= 1);
  CHECK(rig.cache().length(0) == n_tokens);
  CHECK(rig.cache().kept(0) == 22);
  const int64_t rows = 2 * (n_tokens - 22) * byte_size(dtype, head_dim) * 2;
  CHECK(rig.cache().archive_bytes() > static_cast<size_t>(rows));
}

TEST_CASE("recalling all pages is equivalent to the full cache") {
  if (on_gpu()) {  // the emulation is slow
    check_all_pages(DType::f32, 32, 1);
    check_all_pages(DType::f16, 96, 1);
    return check_all_pages(DType::q8_0, 32, 1);
  }
  for (const DType dtype : {DType::f32, DType::f16, DType::q8_0}) {
    for (const int n_threads : {1, 3}) {
      for (const int32_t head_dim : {32, 96}) check_all_pages(dtype, head_dim, n_threads);
    }
  }
}

TEST_CASE("recalled logits are capped, and share the sinks") {
  const LogitRules rules{.softcap = 0.5f, .sinks = {-1, 0.5f, 2, 3}};
  check_all_pages(DType::f32, 32, 1, rules);
  check_all_pages(DType::f16, 64, 1, rules);
}

TEST_CASE("an empty archive changes nothing") {
  const KvShape shape = shape_with(DType::f16, 64, 4);
  KvShape without = shape;
  without.archive = {};
  Random random(1);
  Rig a(kPolicy, shape), b(kPolicy, without);
  for (const int32_t n : {15, 1, 1, 1, 1, 1}) {
    const Qkv in = random_qkv(random, shape, n);
    CHECK(same_bits(a.attend({{0, n}}, in), b.attend({{0, n}}, in)));
  }
  const Qkv in = random_qkv(random, shape, 40);
  CHECK(same_bits(a.attend({{0, 40}}, in), b.attend({{0, 40}}, in)));
  const Qkv later = random_qkv(random, shape, 1);
  CHECK_FALSE(same_bits(a.attend({{0, 1}}, later), b.attend({{0, 1}}, later)));
}

TEST_CASE("heads without an archive lose what they evict") {
  const KvShape shape = shape_with(DType::q8_0, 64, 3);
  KvShape second = shape, none = shape;
  second.archive.heads = {1};
  none.archive = {};
  for (const int n_threads : {1, 3}) {
    Random random(3);
    Rig all(kPolicy, shape, n_threads), some(kPolicy, second, n_threads);
    Rig evicting(kPolicy, none, n_threads);
    for (const int32_t n : mixed_steps(brief() ? 120 : 250)) {
      const Qkv in = random_qkv(random, shape, n);
      const auto of_kv_head = [&](const std::vector<float>& out, int32_t kv_head) {
        const int32_t group = shape.n_heads / shape.n_kv_heads;
        return heads_of(out, n, shape.n_heads, kv_head * group, group, shape.head_dim);
      };
      const std::vector<float> out = some.attend({{0, n}}, in);
      CHECK(same_bits(of_kv_head(out, 0), of_kv_head(evicting.attend({{0, n}}, in), 0)));
      CHECK(same_bits(of_kv_head(out, 1), of_kv_head(all.attend({{0, n}}, in), 1)));
    }
    CHECK(some.cache().archive_bytes() > 0);
    CHECK(some.cache().archive_bytes() < all.cache().archive_bytes());
  }
}

TEST_CASE("recall depends neither on threads nor on other sequences") {
  const KvShape shape = shape_with(DType::q8_0, 64, 3, 2);
  KvShape alone = shape;
  alone.n_sequences = 1;
  Random random(2);
  Rig one(kPolicy, alone), many(kPolicy, shape, 4), grown(kPolicy, alone, 2);
  for (const int32_t n : mixed_steps(brief() ? 180 : 300)) {
    const Qkv in = random_qkv(random, shape, n);
    const Qkv both = joined(random_qkv(random, shape, 2), in);
    const std::vector<float> expected = one.attend({{0, n}}, in);
    std::vector<float> out = many.attend({{0, 2}, {1, n}}, both);
    out.erase(out.begin(), out.end() - std::ssize(expected));
    CHECK(same_bits(expected, out));
    CHECK(same_bits(expected, grown.attend({{0, n}}, in)));
    if (grown.cache().length(0) == 143) grown.cache().reserve_sequences(3);
  }
  CHECK(grown.cache().shape().n_sequences == 3);
  CHECK(same_entries(one, 0, many, 1, shape.n_kv_heads));
  one.reset(0);
  CHECK(one.cache().archive_bytes() == 0);
  grown.reset(0);
  const Qkv in = random_qkv(random, shape, 70);
  CHECK(same_bits(one.attend({{0, 70}}, in), grown.attend({{0, 70}}, in)));
}

TEST_CASE("a cache that cannot grow has the archives that it had") {
  const KvShape shape = [] {
    KvShape one = shape_with(DType::f16, 32, 2, 2);
    one.n_sequences = 1;
    return one;
  }();
  Rig rig(kPolicy, shape, 1);
  bool fails = true;
  for (int64_t n = 1; fails; ++n) {
    const FailingAllocation failing(n);
    try {
      rig.cache().reserve_sequences(4);
    } catch (const std::bad_alloc&) {
      CHECK(rig.cache().archive()->n_sequences() == 1);
      CHECK(rig.cache().shape().n_sequences == 1);
    }
    fails = failing.failed();
  }
  CHECK(rig.cache().archive()->n_sequences() == 4);
  CHECK(rig.cache().shape().n_sequences == 4);
}

// With a policy without scores, everything kept and archived is rounded rows.
TEST_CASE("CUDA archives the same bits as the CPU" * doctest::skip(!on_gpu())) {
  constexpr KvPolicy kRing{.sinks = 2, .heavy = 0, .recent = 20};
  struct Types {
    DType k, v;
  };
  constexpr Types kArchived[] = {{DType::f32, DType::f32},   {DType::f16, DType::f16},
                                 {DType::bf16, DType::bf16}, {DType::q8_0, DType::q8_0},
                                 {DType::q4_0, DType::q4_0}, {DType::q3, DType::q2}};
  for (const DType kept : {DType::f32, DType::f16, DType::bf16, DType::q8_0}) {
    for (const Types archived : kArchived) {
      if (kept != DType::f32 && kept != archived.k && archived.k != DType::q3) continue;
      CAPTURE(info(kept).name);
      CAPTURE(info(archived.k).name);
      KvShape shape = shape_with(kept, 64, 3);
      shape.archive.k_dtype = archived.k;
      shape.archive.v_dtype = archived.v;
      Rig cuda(kRing, shape);
      Rig cpu(make_backend("cpu", 1), std::span(&kRing, 1), shape);
      Random random(9);
      for (const int32_t n : {30, 1, 1, 70, 5, 1, 70, 1, 1, 22, 1}) {
        Qkv in = random_qkv(random, shape, n);
        if (n == 5) {  // scales that are 0 in f16: these rows are not what they decode to
          for (float& x : in.v) x *= 1e-8f;
        }
        cuda.attend({{0, n}}, in);
        cpu.attend({{0, n}}, in);
        CHECK(bytes_of(cuda) == bytes_of(cpu));
      }
      CHECK(cuda.cache().archive_bytes() == cpu.cache().archive_bytes());
      CHECK(cuda.cache().archive_bytes() > 0);
      // The counts and bounds of all pages are on the device too.
      const KvArchive& archive = *cuda.cache().archive();
      const int64_t summaries = shape.n_kv_heads * archive.n_pages() *
                                (int64_t{sizeof(int32_t)} + archive.bounds_bytes());
      CHECK(cpu.cache().bytes() == KvCache::bytes(std::span(&kRing, 1), shape));
      const auto more = static_cast<int64_t>(cuda.cache().bytes() - cpu.cache().bytes());
      CHECK(more >= summaries);
      CHECK(more < summaries + 2 * 64);  // each array begins on a cache line
    }
  }
}

// In f32, where no product is in f16.
TEST_CASE("a sequence with an archive can be transferred" * doctest::skip(!on_gpu())) {
  const KvShape shape = shape_with(DType::f32, 32, 3);
  Rig cuda(kPolicy, shape);
  Rig cpu(make_backend("cpu", 1), std::span(&kPolicy, 1), shape);
  Random random(10);
  for (const int32_t n : mixed_steps(brief() ? 200 : 350)) {
    const Qkv in = whole_qkv(random, shape, n);
    const std::vector<float> expected = cpu.attend({{0, n}}, in);
    const std::vector<float> actual = cuda.attend({{0, n}}, in);
    double worst = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      worst = std::max<double>(worst, std::abs(actual[i] - expected[i]));
    }
    CHECK(worst < 1e-4);  // one page more or less changes it by at least 0.01
    for (int32_t h = 0; h < shape.n_kv_heads; ++h) {
      const auto positions = [h](const Rig& rig) {
        std::vector<int32_t> all;
        for (const KvEntry& entry : rig.entries(0, h)) all.push_back(entry.position);
        return all;
      };
      CHECK(positions(cuda) == positions(cpu));
    }
    // Alternates between the two.
    Rig& from = n % 2 == 0 ? cuda : cpu;
    Rig& to = n % 2 == 0 ? cpu : cuda;
    const std::vector<std::byte> bytes = bytes_of(from);
    ByteReader reader("the sequence", bytes);
    read_sequence(to.cache(), 0, from.cache().length(0), reader);
    CHECK(bytes_of(to) == bytes);
  }
}

TEST_CASE("files that the disk has no room for are refused before they fill it") {
  const std::unique_ptr<Backend> backend = test_backend();
  const ArchiveOptions options{.n_recalled = 1,
                               .directory = std::filesystem::temp_directory_path()};
  KvArchive archive(*backend, options, 1, 1, 64, 1 << 20);
  CHECK_THROWS_AS(archive.reserve_sequences(INT32_MAX), OutOfMemory);
}

TEST_CASE("an archive limits the number of tokens") {
  KvShape shape = shape_with(DType::f16, 32, 2);
  shape.max_tokens = 60;
  Rig rig(kPolicy, shape);
  Random random(3);
  rig.attend({{0, 50}}, random_qkv(random, shape, 50));
  CHECK(rig.cache().room(0) == 10);
}

TEST_CASE("the number of pages of the longest sequences") {
  const std::unique_ptr<Backend> backend = test_backend();
  for (const auto& [dtype, page_tokens] : {std::pair(DType::q8_0, 16), std::pair(DType::q3, 32)}) {
    const ArchiveOptions options = {.n_recalled = 1, .k_dtype = dtype};
    const auto n_pages = [&](int32_t n) {
      return KvArchive(*backend, options, 1, 1, 32, n).n_pages();
    };
    CHECK(n_pages(1) == 1);
    CHECK(n_pages(page_tokens) == 1);
    CHECK(n_pages(page_tokens + 1) == 2);
    CHECK(n_pages(INT32_MAX) == (int64_t{1} << 31) / page_tokens);
  }
}

TEST_CASE("invalid archive options are rejected") {
  KvShape shape = shape_with(DType::f16, 32, 2);
  if (on_gpu()) {
    shape.archive.directory = "directory";
    CHECK_THROWS_WITH_AS(Rig(kPolicy, shape), doctest::Contains("leave out archive_dir"),
                         InvalidArgument);
    shape.archive = {.n_recalled = 2, .k_dtype = DType::q5_0};
    CHECK_THROWS_WITH_AS(Rig(kPolicy, shape), doctest::Contains("does not archive K and V in Q5_0"),
                         InvalidArgument);
    shape.archive = {};
  }
  shape.archive.n_recalled = -1;
  CHECK_THROWS_AS(Rig(kPolicy, shape), InvalidArgument);
  shape.archive = {.n_recalled = 1, .k_dtype = DType::q4_k};
  CHECK_THROWS_AS(Rig(kPolicy, shape), InvalidArgument);
  shape.archive = {.n_recalled = 1, .heads = {0, 2}};
  CHECK_THROWS_WITH_AS(Rig(kPolicy, shape), doctest::Contains("archived head 2"), InvalidArgument);
  shape.archive = {.n_recalled = 1};
  shape.rope = rope_of(shape.head_dim);
  CHECK_THROWS_WITH_AS(Rig(kPolicy, shape), doctest::Contains("rolling"), InvalidArgument);
}

}  // namespace
}  // namespace h2o
