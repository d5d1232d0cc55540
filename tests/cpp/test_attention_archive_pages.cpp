// Which pages of an archive are recalled, compared with a simple reference.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>

#include "archive_rig.h"
#include "cpu/attention/recall.h"

namespace h2o {
namespace {

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

  // The pages that a row recalls, those with the largest estimates first.
  std::vector<int32_t> recalled(const Qkv& in, int64_t row, int32_t kv_head,
                                const Pages& before) const {
    std::vector<std::pair<double, int32_t>> estimates;  // negated: the largest comes first
    for (const auto& [page, tokens] : before.archived) {
      estimates.push_back({-estimate(in, row, kv_head, tokens), page});
    }
    std::sort(estimates.begin(), estimates.end());
    std::vector<int32_t> pages;
    const size_t n = std::min<size_t>(estimates.size(), shape_.archive.n_recalled);
    for (size_t i = 0; i < n; ++i) pages.push_back(estimates[i].second);
    return pages;
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
  const float* queries(const Qkv& in, int64_t row, int32_t kv_head) const {
    const int64_t group = shape_.n_heads / shape_.n_kv_heads;
    return in.q.data() + (row * shape_.n_heads + kv_head * group) * shape_.head_dim;
  }

  // Estimates a page with these tokens: the largest of all queries of a row.
  double estimate(const Qkv& in, int64_t row, int32_t kv_head,
                  const std::vector<int32_t>& tokens) const {
    const float* const q = queries(in, row, kv_head);
    double found = -1e300;
    for (int64_t h = 0; h < shape_.n_heads / shape_.n_kv_heads; ++h) {
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
      found = std::max(found, sum);
    }
    return found;
  }

  // [group, head_dim]
  std::vector<double> attend(const Qkv& in, int64_t row, int32_t kv_head, int32_t position,
                             const Pages& before) const {
    const int64_t group = shape_.n_heads / shape_.n_kv_heads;
    const float* const q = queries(in, row, kv_head);
    std::vector<int32_t> seen = before.slots;
    for (int64_t i = 0; i <= row; ++i) seen.push_back(position - static_cast<int32_t>(i));
    for (const int32_t page : recalled(in, row, kv_head, before)) {
      const std::vector<int32_t>& tokens = before.archived.at(page);
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
    std::vector<int64_t> recalls(rig.cache().archive()->n_pages());
    for (const int32_t n : mixed_steps(brief() ? 200 : 300)) {
      const Qkv in = whole_qkv(random, shape, n);
      const int32_t length = rig.cache().length(0);
      const std::vector<Pages> before = pages_of(rig);
      const std::vector<float> out = rig.attend({{0, n}}, in);
      for (int32_t h = 0; h < shape.n_kv_heads; ++h) {
        for (int32_t row = 0; row < n; ++row) {
          plain[h].add(in, row, h);
          worst = std::max(worst, plain[h].distance(out, in, row, h, length + row, before[h]));
          for (const int32_t page : plain[h].recalled(in, row, h, before[h])) ++recalls[page];
        }
      }
    }
    CHECK(worst < 1e-4);  // one page more or less changes it by at least 0.01
    if (!on_gpu()) CHECK(rig.cache().archive()->recalls(0) == recalls);
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

TEST_CASE("more pages than a sequence has can be asked for") {
  const KvShape all = shape_with(DType::f16, 32, 25);  // of 400 tokens
  const KvShape most = shape_with(DType::f16, 32, std::numeric_limits<int32_t>::max());
  for (const int n_threads : {1, 3}) {
    Rig a(kPolicy, all, n_threads), b(kPolicy, most, n_threads);
    CHECK(a.cache().archive()->n_pages() == 25);
    Random random(4);
    for (const int32_t n : {70, 70, 3, 1}) {
      const Qkv in = random_qkv(random, all, n);
      CHECK(same_bits(a.attend({{0, n}}, in), b.attend({{0, n}}, in)));
    }
  }
}

// In decode, with one and with three kv_heads, and in a chunk.
TEST_CASE("parts of the pages can be searched by any number of threads") {
  for (const int32_t n_kv_heads : {1, 3}) {
    if (brief() && on_cuda() && n_kv_heads > 1) continue;  // slow if emulated
    CAPTURE(n_kv_heads);
    KvShape shape = shape_with(DType::f32, 64, 40);
    shape.n_heads = 2 * n_kv_heads;
    shape.n_kv_heads = n_kv_heads;
    shape.max_tokens = 9000;
    shape.max_rows = 500;
    std::vector<std::unique_ptr<Rig>> rigs;
    for (const int n_threads : {1, 2, 3, 7}) {
      if (on_gpu() && n_threads > 1) break;
      if (brief() && n_threads == 2) continue;
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

}  // namespace
}  // namespace h2o
