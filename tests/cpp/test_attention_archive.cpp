// Attention with an archive: evicted tokens are recalled by pages.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <memory>

#include "attention_check.h"
#include "core/error.h"
#include "cpu/attention/recall.h"
#include "kv/serialized_sequence.h"

namespace h2o {
namespace {

KvShape shape_with(DType dtype, int32_t head_dim, int32_t n_recalled, int32_t n_sequences = 1) {
  return {.n_sequences = n_sequences,
          .n_heads = 4,
          .n_kv_heads = 2,
          .head_dim = head_dim,
          .max_tokens = 400,
          .max_rows = 70,
          .k_dtype = dtype,
          .v_dtype = dtype,
          .archive = {.n_recalled = n_recalled, .k_dtype = dtype, .v_dtype = dtype}};
}

constexpr KvPolicy kPolicy{.sinks = 1, .heavy = 9, .recent = 12};

// Chunks, single tokens, and chunks again.
std::vector<int32_t> mixed_steps(int32_t n_tokens) {
  std::vector<int32_t> steps;
  for (int32_t done = 0; done < n_tokens; done += steps.back()) {
    const size_t i = steps.size() % 40;
    steps.push_back(std::min(i < 3 ? 30 : i < 36 ? 1 : 5, n_tokens - done));
  }
  return steps;
}

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
  for (const int32_t n : mixed_steps(350)) {
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
  CHECK(rig.cache().length(0) == 350);
  CHECK(rig.cache().kept(0) == 22);
  const int64_t rows = 2 * (350 - 22) * byte_size(dtype, head_dim) * 2;
  CHECK(rig.cache().archive_bytes() > static_cast<size_t>(rows));
}

TEST_CASE("recalling all pages is equivalent to the full cache") {
  if (on_cuda()) {  // the emulation is slow
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

// Keys and queries are integers, so that estimates are exact: bounds have 8 bits from 1/32 on (the
// mean of 16 keys minus half their range), times q 11/16 or q 5/16, and sums are below 2^7.
Qkv whole_qkv(Random& random, const KvShape& shape, int32_t n) {
  Qkv in = random_qkv(random, shape, n);
  for (float& x : in.q) x = std::round(x);
  for (float& x : in.k) x = std::round(2 * x);
  return in;
}

// For one kv_head: the positions in slots, and the archived ones by page.
struct Pages {
  std::vector<int32_t> slots;
  std::map<int32_t, std::vector<int32_t>> archived;
};

std::vector<Pages> pages_of(Rig& rig) {
  std::vector<Pages> all(rig.cache().shape().n_kv_heads);
  for (size_t h = 0; h < all.size(); ++h) {
    for (const KvEntry& entry : rig.entries(0, static_cast<int32_t>(h))) {
      all[h].slots.push_back(entry.position);
    }
    for (int32_t position = 0; position < rig.cache().length(0); ++position) {
      if (!std::binary_search(all[h].slots.begin(), all[h].slots.end(), position)) {
        all[h].archived[position / kPageTokens].push_back(position);
      }
    }
  }
  return all;
}

double rounded_to_bf16(double x) {
  int exponent = 0;
  const double fraction = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(fraction, 8)), exponent - 8);
}

// A simple reference of one kv_head in double: which pages a row recalls, and its attention output.
class PlainArchive {
 public:
  PlainArchive(const KvShape& shape) : shape_(shape) {}

  // Adds the next token, from one row of a step.
  void add(const Qkv& in, int64_t row, int32_t kv_head) {
    const auto of = [&](const std::vector<float>& x) {
      const auto from = x.begin() + (row * shape_.n_kv_heads + kv_head) * shape_.head_dim;
      return std::vector<double>(from, from + shape_.head_dim);
    };
    keys_.push_back(of(in.k));
    values_.push_back(of(in.v));
  }

  // The maximum error of `out`, over all heads, for a row at a position.
  double distance(const std::vector<float>& out, const Qkv& in, int64_t row, int32_t kv_head,
                  int32_t position, const Pages& before) const {
    const int64_t group = shape_.n_heads / shape_.n_kv_heads;
    const std::vector<double> expected = attend(in, row, kv_head, position, before);
    const float* const actual =
        out.data() + (row * shape_.n_heads + kv_head * group) * shape_.head_dim;
    double worst = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      worst = std::max(worst, std::abs(expected[i] - actual[i]));
    }
    return worst;
  }

 private:
  // [group, head_dim]
  std::vector<double> attend(const Qkv& in, int64_t row, int32_t kv_head, int32_t position,
                             const Pages& before) const {
    const int64_t group = shape_.n_heads / shape_.n_kv_heads;
    const float* const q = in.q.data() + (row * shape_.n_heads + kv_head * group) * shape_.head_dim;
    std::vector<std::pair<double, int32_t>> estimates;  // negated: the largest comes first
    for (const auto& [page, tokens] : before.archived) {
      double estimate = -1e300;
      for (int64_t h = 0; h < group; ++h) {
        double sum = 0;
        for (int32_t d = 0; d < shape_.head_dim; ++d) {
          double largest = -1e300;
          double smallest = 1e300;
          double keys = 0;
          for (const int32_t token : tokens) {
            largest = std::max(largest, keys_[token][d]);
            smallest = std::min(smallest, keys_[token][d]);
            keys += keys_[token][d];
          }
          const auto mean = static_cast<float>(keys / static_cast<double>(tokens.size()));
          const auto half_range = static_cast<float>((largest - smallest) / 2);
          const double upper = rounded_to_bf16(mean + half_range);
          const double lower = rounded_to_bf16(mean - half_range);
          const double x = q[h * shape_.head_dim + d];
          sum += (upper + lower) / 2 * x + 0.375 * (upper - lower) / 2 * std::abs(x);
        }
        estimate = std::max(estimate, sum);
      }
      estimates.push_back({-estimate, page});
    }
    std::sort(estimates.begin(), estimates.end());
    std::vector<int32_t> seen = before.slots;
    for (int64_t i = 0; i <= row; ++i) seen.push_back(position - static_cast<int32_t>(i));
    const size_t n = std::min<size_t>(estimates.size(), shape_.archive.n_recalled);
    for (size_t i = 0; i < n; ++i) {
      const std::vector<int32_t>& tokens = before.archived.at(estimates[i].second);
      seen.insert(seen.end(), tokens.begin(), tokens.end());
    }
    std::vector<double> out;
    for (int64_t h = 0; h < group; ++h) {
      std::vector<double> sums(shape_.head_dim);
      double total = 0;
      for (const int32_t token : seen) {
        double logit = 0;
        for (int32_t d = 0; d < shape_.head_dim; ++d) {
          logit += double{q[h * shape_.head_dim + d]} * keys_[token][d];
        }
        const double power = std::exp(logit * attention_scale(shape_));
        total += power;
        for (int32_t d = 0; d < shape_.head_dim; ++d) sums[d] += power * values_[token][d];
      }
      for (const double sum : sums) out.push_back(sum / total);
    }
    return out;
  }

  const KvShape& shape_;
  std::vector<std::vector<double>> keys_, values_;  // of all tokens
};

TEST_CASE("the pages with the largest estimates are recalled") {
  for (const int32_t n_recalled : {1, 2, 5}) {
    CAPTURE(n_recalled);
    const KvShape shape = shape_with(DType::f32, 8, n_recalled);
    Rig rig(kPolicy, shape);
    std::vector<PlainArchive> plain(shape.n_kv_heads, shape);
    Random random(n_recalled);
    double worst = 0;
    for (const int32_t n : mixed_steps(300)) {
      const Qkv in = whole_qkv(random, shape, n);
      const int32_t length = rig.cache().length(0);
      const std::vector<Pages> before = pages_of(rig);
      const std::vector<float> out = rig.attend({{0, n}}, in);
      for (int32_t h = 0; h < shape.n_kv_heads; ++h) {
        for (int32_t row = 0; row < n; ++row) {
          plain[h].add(in, row, h);
          worst = std::max(worst, plain[h].distance(out, in, row, h, length + row, before[h]));
        }
      }
    }
    CHECK(worst < 1e-4);  // one page more or less changes it by at least 0.01
  }
}

TEST_CASE(
    "pages that are recalled by default grow with the square root of the context, from 16 to 48") {
  CHECK(default_archive_pages(1) == 16);
  CHECK(default_archive_pages(513) == 16);  // 0.75^2 * 513 < 17^2
  CHECK(default_archive_pages(514) == 17);
  CHECK(default_archive_pages(1024) == 24);
  CHECK(default_archive_pages(4095) == 47);
  CHECK(default_archive_pages(4096) == 48);
  CHECK(default_archive_pages(100'000'000) == 48);
  CHECK(default_archive_pages(-1) == 16);  // the context itself is rejected
}

// In decode, with one and with three kv_heads, and in a chunk.
TEST_CASE("parts of the pages can be searched by any number of threads") {
  for (const int32_t n_kv_heads : {1, 3}) {
    CAPTURE(n_kv_heads);
    KvShape shape = shape_with(DType::f32, 64, 40);
    shape.n_heads = 2 * n_kv_heads;
    shape.n_kv_heads = n_kv_heads;
    shape.max_tokens = 9000;
    shape.max_rows = 500;
    std::vector<std::unique_ptr<Rig>> rigs;
    for (const int n_threads : {1, 2, 3, 7}) {
      if (on_cuda() && n_threads > 1) break;
      rigs.push_back(std::make_unique<Rig>(kPolicy, shape, n_threads));
    }
    std::vector<PlainArchive> plain(n_kv_heads, shape);
    Random random(n_kv_heads);
    double worst = 0;
    for (const int32_t n : {500, 500, 500, 500, 500, 500, 500, 500, 500, 1, 1, 3, 1}) {
      const Qkv in = whole_qkv(random, shape, n);
      const std::vector<Pages> before = pages_of(*rigs[0]);
      const std::vector<float> out = rigs[0]->attend({{0, n}}, in);
      for (size_t i = 1; i < rigs.size(); ++i) {
        CHECK(same_bits(out, rigs[i]->attend({{0, n}}, in)));
      }
      for (int32_t h = 0; h < n_kv_heads; ++h) {
        for (int32_t row = 0; row < n; ++row) plain[h].add(in, row, h);
        if (n == 500) continue;
        const int32_t last = rigs[0]->cache().length(0) - 1;
        worst = std::max(worst, plain[h].distance(out, in, n - 1, h, last, before[h]));
      }
    }
    CHECK(rigs[0]->cache().length(0) / kPageTokens > kPartPages);
    CHECK(worst < 1e-5);
    CHECK(worst > 0);
  }
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

TEST_CASE("recall depends neither on threads nor on other sequences") {
  const KvShape shape = shape_with(DType::q8_0, 64, 3, 2);
  KvShape alone = shape;
  alone.n_sequences = 1;
  Random random(2);
  Rig one(kPolicy, alone), many(kPolicy, shape, 4), grown(kPolicy, alone, 2);
  for (const int32_t n : mixed_steps(on_cuda() ? 200 : 300)) {  // the emulation is slow
    const Qkv in = random_qkv(random, shape, n);
    const Qkv other = random_qkv(random, shape, 2);
    Qkv both = other;
    both.q.insert(both.q.end(), in.q.begin(), in.q.end());
    both.k.insert(both.k.end(), in.k.begin(), in.k.end());
    both.v.insert(both.v.end(), in.v.begin(), in.v.end());
    const std::vector<float> expected = one.attend({{0, n}}, in);
    std::vector<float> out = many.attend({{0, 2}, {1, n}}, both);
    out.erase(out.begin(), out.end() - std::ssize(expected));
    CHECK(same_bits(expected, out));
    CHECK(same_bits(expected, grown.attend({{0, n}}, in)));
    if (grown.cache().length(0) == 150) grown.cache().reserve_sequences(3);
  }
  CHECK(same_entries(one, 0, many, 1, shape.n_kv_heads));
  one.reset(0);
  CHECK(one.cache().archive_bytes() == 0);
  grown.reset(0);
  const Qkv in = random_qkv(random, shape, 70);
  CHECK(same_bits(one.attend({{0, 70}}, in), grown.attend({{0, 70}}, in)));
}

std::vector<std::byte> bytes_of(Rig& rig) {
  ByteWriter writer;
  write_sequence(rig.cache(), 0, writer);
  return std::move(writer.bytes());
}

// With a policy without scores, everything kept and archived is rounded rows.
TEST_CASE("CUDA archives the same bits as the CPU" * doctest::skip(!on_cuda())) {
  constexpr KvPolicy kRing{.sinks = 2, .heavy = 0, .recent = 20};
  for (const DType kept : {DType::f32, DType::f16, DType::bf16, DType::q8_0}) {
    for (const DType archived : {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0}) {
      if (kept != DType::f32 && kept != archived) continue;
      CAPTURE(info(kept).name);
      CAPTURE(info(archived).name);
      KvShape shape = shape_with(kept, 64, 3);
      shape.archive.k_dtype = shape.archive.v_dtype = archived;
      Rig cuda(kRing, shape);
      Rig cpu(make_backend("cpu", 1), std::span(&kRing, 1), shape);
      Random random(9);
      for (const int32_t n : {30, 1, 1, 70, 5, 1, 70, 1, 1, 22, 1}) {
        const Qkv in = random_qkv(random, shape, n);
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
TEST_CASE("a sequence with an archive can be transferred" * doctest::skip(!on_cuda())) {
  const KvShape shape = shape_with(DType::f32, 32, 3);
  Rig cuda(kPolicy, shape);
  Rig cpu(make_backend("cpu", 1), std::span(&kPolicy, 1), shape);
  Random random(10);
  for (const int32_t n : mixed_steps(350)) {
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

TEST_CASE("an archive limits the number of tokens") {
  KvShape shape = shape_with(DType::f16, 32, 2);
  shape.max_tokens = 60;
  Rig rig(kPolicy, shape);
  Random random(3);
  rig.attend({{0, 50}}, random_qkv(random, shape, 50));
  CHECK(rig.cache().room(0) == 10);
}

TEST_CASE("invalid archive options are rejected") {
  KvShape shape = shape_with(DType::f16, 32, 2);
  if (on_cuda()) {
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
  shape.archive = {.n_recalled = 1};
  shape.rope = rope_of(shape.head_dim);
  CHECK_THROWS_WITH_AS(Rig(kPolicy, shape), doctest::Contains("rolling"), InvalidArgument);
}

}  // namespace
}  // namespace h2o
