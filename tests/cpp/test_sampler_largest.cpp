// Compares Sampler with the largest logits of a row and with all of them: the same tokens and
// random numbers, or no token.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "testing.h"
#include "text/sampler.h"

namespace h2o {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kMax = LargestLogits::kMax;

float normal(Random& random) {
  float sum = -6;
  for (int i = 0; i < 12; ++i) sum += random.real(0, 1);
  return sum;
}

// Simulates the back end's result; `error`: relative error of `rest`.
LargestLogits largest_of(const std::vector<float>& logits, float temperature, double error) {
  std::vector<int32_t> order;
  for (int32_t i = 0; i < std::ssize(logits); ++i) {
    if (logits[i] > -kInfinity) order.push_back(i);
  }
  std::ranges::stable_sort(order, std::greater<>(), [&](int32_t i) { return logits[i]; });
  LargestLogits out{
      .n = std::min(static_cast<int32_t>(order.size()), kMax), .rest = 0, .logits = {}};
  double rest = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    const float logit = logits[order[i]];
    if (i < size_t{kMax}) {
      out.logits[i] = {order[i], logit};
    } else if (temperature > 0) {
      rest += std::exp((logit - logits[order[0]]) / temperature);
    }
  }
  out.rest = static_cast<float>(rest * (1 + error));
  return out;
}

// A row of one of several kinds: spread, peaked, with ties, mostly forbidden, with NaN and
// infinity.
std::vector<float> random_row(Random& random, int32_t n_vocab) {
  std::vector<float> row(n_vocab);
  const int kind = random.integer(0, 6);
  for (float& x : row) x = 3 * normal(random);
  for (float& x : row) {
    if (kind == 1) x = random.integer(0, 99) == 0 ? 12 + x : x;
    if (kind == 2) x = std::round(x);
    if (kind == 3 && random.integer(0, 9) != 0) x = -kInfinity;
    if (kind == 4) x = 0.25f;
    if (kind == 5) x *= 3;
  }
  for (int n = kind == 6 ? 5 : 0; n > 0; --n) row[random.integer(0, n_vocab - 1)] = NAN;
  if (random.integer(0, 40) == 0) row[random.integer(0, n_vocab - 1)] = kInfinity;
  return row;
}

SamplerOptions random_options(Random& random, int32_t n_vocab) {
  SamplerOptions o;
  const auto now_and_then = [&] { return random.integer(0, 3) == 0; };
  o.temperature = now_and_then() ? 0 : random.real(0.3f, 1.5f);
  o.top_k = random.flip() ? 0 : random.integer(1, random.flip() ? 60 : 300);
  o.top_p = random.flip() ? 1.0f : random.real(0.2f, 0.99f);
  o.min_p = random.flip() ? 0.0f : random.real(0.001f, 0.3f);
  o.seed = random.bits();
  if (random.flip()) {
    o.repeat_penalty = random.real(1, 1.5f);
    o.repeat_last_n = random.integer(-1, 80);
  }
  if (now_and_then()) o.frequency_penalty = random.real(0, 1);
  if (now_and_then()) o.presence_penalty = random.real(0, 1);
  if (random.integer(0, 9) == 0) o.presence_penalty = -0.5f;
  if (now_and_then()) {
    o.logit_bias.push_back({0, -kInfinity});
    o.logit_bias.push_back(
        {random.integer(1, n_vocab - 1), random.real(-4, random.flip() ? 0 : 2)});
  }
  if (now_and_then()) o.dry_multiplier = 0.8f;
  if (now_and_then()) o.typical_p = 0.9f;
  if (now_and_then()) o.xtc_probability = 0.5f;
  if (random.integer(0, 9) == 0) o.dynatemp_range = 0.3f;
  if (random.integer(0, 9) == 0) o.top_n_sigma = 2;
  if (random.integer(0, 9) == 0) o.mirostat = random.integer(1, 2);
  if (now_and_then()) o.samplers = {llama_cpp_steps().begin(), llama_cpp_steps().end()};
  return o;
}

struct Counts {
  int drawn = 0, all = 0;
};

// Draws and accepts tokens from rows with both; returns how many were drawn from the largest
// logits.
Counts check_same(Random& random, const SamplerOptions& options, int32_t n_vocab, int n_rows) {
  Sampler whole(options, n_vocab), few(options, n_vocab);
  Counts counts;
  for (int i = 0; i < n_rows; ++i) {
    const std::vector<float> row = random_row(random, n_vocab);
    const LargestLogits largest =
        largest_of(row, few.rest_temperature(), random.real(-1, 1) * 0x1p-13);
    const std::optional<int32_t> token = few.sample(largest);
    const int32_t expected = whole.sample(row);
    if (token) {
      CHECK(*token == expected);
      CHECK(few.may_draw_from_largest());
    } else {
      CHECK(few.sample(row) == expected);
    }
    CHECK(few.random_state() == whole.random_state());
    whole.accept(expected);
    few.accept(expected);
    counts.drawn += token.has_value() ? 1 : 0;
    ++counts.all;
  }
  return counts;
}

TEST_CASE("any options: drawing from the largest logits gives the same tokens as from all") {
  Random random(1);
  Counts total;
  const int n_rounds = brief() ? 20 : 150;
  for (const int32_t n_vocab : {5, 200, 256, 257, 900, 1100, 4000}) {
    for (int round = 0; round < n_rounds; ++round) {
      CAPTURE(n_vocab);
      CAPTURE(round);
      const Counts counts = check_same(random, random_options(random, n_vocab), n_vocab, 6);
      total.drawn += counts.drawn;
      total.all += counts.all;
    }
  }
  CHECK(total.drawn > total.all / 3);
}

TEST_CASE("common options almost always draw from the largest logits") {
  Random random(2);
  SamplerOptions defaults, nucleus, greedy;
  defaults.repeat_penalty = 1.1f;
  nucleus.top_k = 0;
  nucleus.min_p = 0;
  nucleus.top_p = 0.8f;
  nucleus.temperature = 0.5f;
  greedy.temperature = 0;
  greedy.frequency_penalty = 0.5f;
  SamplerOptions min_p = nucleus;
  min_p.top_p = 1;
  min_p.min_p = 0.05f;
  const int n_rows = brief() ? 30 : 200;
  for (const SamplerOptions& options : {defaults, nucleus, greedy, min_p}) {
    const Counts counts = check_same(random, options, 5000, n_rows);
    CHECK(counts.drawn > n_rows * 6 / 10);  // rows of one value, or with infinity, never do
  }
}

TEST_CASE("no token is drawn if other logits could change it") {
  const int32_t n_vocab = 3000;
  std::vector<float> row(n_vocab);
  std::iota(row.rbegin(), row.rend(), 0.0f);  // descending
  for (float& x : row) x *= 0.01f;
  const auto draws = [&](SamplerOptions options) {
    Sampler sampler(options, n_vocab);
    for (int32_t token = 0; token < 250; ++token) sampler.accept(token);
    return sampler.sample(largest_of(row, sampler.rest_temperature(), 0)).has_value();
  };
  SamplerOptions o{.temperature = 1, .top_k = 40, .top_p = 1, .min_p = 0};
  CHECK(draws(o));
  o.top_k = 256;
  CHECK(draws(o));
  o.top_k = 257;
  CHECK(!draws(o));
  o.top_k = 0;
  CHECK(!draws(o));  // all
  o.min_p = 0.07f;   // 2.66 below the largest, and 256 of them reach 2.55
  CHECK(!draws(o));
  o.min_p = 0.08f;
  CHECK(draws(o));
  o.min_p = 0;
  o.top_p = 0.95f;  // 1 - e^-2.56 = 0.923
  CHECK(!draws(o));
  o.top_p = 0.9f;
  CHECK(draws(o));
  o.top_k = 40;
  o.repeat_last_n = 250;
  o.repeat_penalty = 2;  // 6 of the known ones remain
  CHECK(!draws(o));
  o.top_k = 6;
  CHECK(draws(o));
  o.repeat_penalty = 0.9f;  // raises others, too
  CHECK(!draws(o));
}

}  // namespace
}  // namespace h2o
