// Sampler: which tokens survive each filter, the order of filters, the frequencies of draws, and
// robustness against any input.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "core/error.h"
#include "text/sampler.h"

namespace h2o {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// No filtering and no scaling.
SamplerOptions plain(uint64_t seed = 1) {
  return {.temperature = 1,
          .top_k = 0,
          .top_p = 1,
          .min_p = 0,
          .repeat_penalty = 1,
          .repeat_last_n = 64,
          .seed = seed};
}

std::vector<float> logits_of(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (const double p : probabilities) logits.push_back(static_cast<float>(std::log(p) + 3));
  return logits;
}

std::vector<int> draw(Sampler& sampler, const std::vector<float>& logits, int n) {
  std::vector<int> counts(logits.size());
  for (int i = 0; i < n; ++i) ++counts.at(sampler.sample(logits));
  return counts;
}

// All tokens drawn at least once. If each survivor has at least 1 %, 4000 draws miss one with a
// probability below 0.99^4000 = 4e-18.
std::vector<int32_t> survivors(const SamplerOptions& options, const std::vector<float>& logits,
                               const std::vector<int32_t>& accepted = {}) {
  Sampler sampler(options, static_cast<int32_t>(logits.size()));
  for (const int32_t token : accepted) sampler.accept(token);
  const std::vector<int> counts = draw(sampler, logits, 4000);
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > 0) tokens.push_back(static_cast<int32_t>(i));
  }
  return tokens;
}

using Tokens = std::vector<int32_t>;

// Tests counts against probabilities. Pearson's chi-square with d degrees of freedom exceeds d + 2
// sqrt(d x) + 2 x with a probability of at most e^-x (Laurent and Massart 2000, lemma 1); x = 14
// makes it one in a million. The seeds are fixed, so results are reproducible.
void check_frequencies(const std::vector<int>& counts, const std::vector<double>& weights) {
  double n = 0;
  double total = 0;
  for (const int count : counts) n += count;
  for (const double weight : weights) total += weight;
  double chi_square = 0;
  double freedom = -1;
  for (size_t i = 0; i < counts.size(); ++i) {
    const double expected = n * weights[i] / total;
    if (expected == 0) {
      CHECK(counts[i] == 0);
      continue;
    }
    chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
    ++freedom;
  }
  CHECK(chi_square <= freedom + 2 * std::sqrt(freedom * 14) + 2 * 14);
}

TEST_CASE("temperature 0 selects the largest logit, ties: the lowest id") {
  SamplerOptions greedy = plain();
  greedy.temperature = 0;
  Sampler sampler(greedy, 5);
  CHECK(sampler.sample(std::vector<float>{1, 3, 2, 3, 3}) == 1);
  CHECK(sampler.sample(std::vector<float>{7, 7, 7, 7, 7}) == 0);
  CHECK(sampler.sample(std::vector<float>{-5, -4, -3, -2, -1}) == 4);
  CHECK(sampler.sample(std::vector<float>{-kInfinity, -3, -kInfinity, -3, -9}) == 1);
  CHECK(sampler.sample(std::vector<float>{1, 2, kInfinity, 4, 5}) == 2);
}

TEST_CASE("top_k = 1 is greedy, ties included") {
  SamplerOptions one = plain();
  one.top_k = 1;
  SamplerOptions greedy = plain();
  greedy.temperature = 0;
  Sampler a(one, 50);
  Sampler b(greedy, 50);
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    std::vector<float> logits(50);
    for (float& logit : logits) logit = static_cast<float>(random() % 20);
    CHECK(a.sample(logits) == b.sample(logits));
  }
}

TEST_CASE("the same seed gives the same tokens, another seed different ones") {
  const std::vector<float> logits(1000, 0.5f);
  Sampler a(plain(7), 1000);
  Sampler b(plain(7), 1000);
  Sampler c(plain(8), 1000);
  int n_equal = 0;
  for (int i = 0; i < 100; ++i) {
    const int32_t token = a.sample(logits);
    CHECK(b.sample(logits) == token);
    n_equal += c.sample(logits) == token;
  }
  CHECK(n_equal < 10);  // 0.1 expected
}

TEST_CASE("a seed gives these tokens on every platform") {
  // The first outputs of std::mt19937_64(5489), as specified by the standard, as fractions of 2^64
  // over 1000 equal weights.
  Sampler sampler(plain(5489), 1000);
  const std::vector<float> logits(1000, 0.0f);
  for (const uint64_t output :
       {14514284786278117030u, 4620546740167642908u, 13109570281517897720u}) {
    CHECK(sampler.sample(logits) == static_cast<int32_t>(std::ldexp(output, -64) * 1000));
  }
}

TEST_CASE("tokens are drawn with softmax probabilities") {
  const std::vector<double> p = {0.3, 0.05, 0.25, 0.001, 0.199, 0.2};
  const std::vector<float> logits = logits_of(p);
  Sampler sampler(plain(), 6);
  check_frequencies(draw(sampler, logits, 50'000), p);

  for (const float temperature : {0.25f, 0.7f, 2.0f, 100.0f}) {
    CAPTURE(temperature);
    SamplerOptions options = plain(2);
    options.temperature = temperature;
    Sampler scaled(options, 6);
    std::vector<double> weights;
    for (const double x : p) weights.push_back(std::pow(x, 1 / double{temperature}));
    check_frequencies(draw(scaled, logits, 50'000), weights);
  }
}

TEST_CASE("top_k keeps the k most probable") {
  const std::vector<double> p = {0.1, 0.3, 0.05, 0.25, 0.2, 0.1};
  SamplerOptions options = plain();
  for (const auto& [k, expected] :
       std::vector<std::pair<int32_t, Tokens>>{{1, {1}},
                                               {2, {1, 3}},
                                               {3, {1, 3, 4}},
                                               {4, {0, 1, 3, 4}},  // a tie: the lower id
                                               {5, {0, 1, 3, 4, 5}},
                                               {6, {0, 1, 2, 3, 4, 5}},
                                               {1000, {0, 1, 2, 3, 4, 5}}}) {
    options.top_k = k;
    CAPTURE(options.top_k);
    CHECK(survivors(options, logits_of(p)) == expected);
  }
  options.top_k = 3;
  Sampler sampler(options, 6);
  check_frequencies(draw(sampler, logits_of(p), 50'000), {0, 0.3, 0, 0.25, 0.2, 0});
}

TEST_CASE("top_p keeps the smallest set with that probability") {
  const std::vector<double> p = {0.1, 0.4, 0.05, 0.25, 0.2};
  SamplerOptions options = plain();
  for (const auto& [top_p, expected] :
       std::vector<std::pair<float, Tokens>>{{1e-30f, {1}},
                                             {0.39f, {1}},
                                             {0.41f, {1, 3}},
                                             {0.64f, {1, 3}},
                                             {0.66f, {1, 3, 4}},
                                             {0.84f, {1, 3, 4}},
                                             {0.86f, {0, 1, 3, 4}},
                                             {0.96f, {0, 1, 2, 3, 4}}}) {
    options.top_p = top_p;
    CAPTURE(options.top_p);
    CHECK(survivors(options, logits_of(p)) == expected);
  }
  options.top_p = 0.66f;
  Sampler sampler(options, 5);
  check_frequencies(draw(sampler, logits_of(p), 50'000), {0, 0.4, 0, 0.25, 0.2});
}

TEST_CASE("min_p keeps tokens at least that times as probable as the most probable") {
  const std::vector<double> p = {0.1, 0.4, 0.05, 0.25, 0.2};  // of 0.4: 0.25, 1, 0.125, 0.625, 0.5
  SamplerOptions options = plain();
  for (const auto& [min_p, expected] :
       std::vector<std::pair<float, Tokens>>{{0.12f, {0, 1, 2, 3, 4}},
                                             {0.13f, {0, 1, 3, 4}},
                                             {0.24f, {0, 1, 3, 4}},
                                             {0.26f, {1, 3, 4}},
                                             {0.49f, {1, 3, 4}},
                                             {0.51f, {1, 3}},
                                             {0.63f, {1}},
                                             {1.0f, {1}}}) {
    options.min_p = min_p;
    CAPTURE(options.min_p);
    CHECK(survivors(options, logits_of(p)) == expected);
  }
  options.min_p = 1;
  CHECK(survivors(options, {1, 2, 2, 0}) == Tokens{1, 2});  // ties are at least 1 times as probable
}

TEST_CASE("the order is penalty, temperature, top-k, top-p, min-p") {
  SUBCASE("penalty before greedy and before top-k: the penalized best is replaced") {
    SamplerOptions options = plain();
    options.repeat_penalty = 2;
    options.temperature = 0;
    CHECK(survivors(options, {4, 3, 1}, {0}) == Tokens{1});
    options.temperature = 1;
    options.top_k = 2;
    CHECK(survivors(options, {2, 1.9f, 1.5f}, {0}) == Tokens{1, 2});
  }
  SUBCASE("temperature before top-p: a flatter distribution needs more tokens for the same mass") {
    SamplerOptions options = plain();
    options.top_p = 0.6f;
    const std::vector<float> logits = logits_of({0.7, 0.1, 0.1, 0.1});
    CHECK(survivors(options, logits) == Tokens{0});
    options.temperature = 100;
    CHECK(survivors(options, logits) == Tokens{0, 1, 2});
  }
  SUBCASE("temperature before min-p") {
    SamplerOptions options = plain();
    options.min_p = 0.5f;
    options.temperature = 2;  // 0.1 / 0.3 becomes its square root, 0.577
    CHECK(survivors(options, logits_of({0.6, 0.3, 0.1})) == Tokens{0, 1});
    options.temperature = 1;
    options.min_p = 0.55f;
    CHECK(survivors(options, logits_of({0.6, 0.3, 0.1})) == Tokens{0});
  }
  SUBCASE("top-k before top-p: the mass is of the k") {
    SamplerOptions options = plain();
    options.top_k = 2;
    options.top_p = 0.5f;  // 0.4 of all, but 0.57 of the two
    CHECK(survivors(options, logits_of({0.4, 0.3, 0.2, 0.1})) == Tokens{0});
  }
  SUBCASE("top-p before min-p: the mass is of all") {
    SamplerOptions options = plain();
    options.top_p = 0.75f;  // 0.7 of all after two, but 0.78 of what min-p leaves
    options.min_p = 0.3f;
    CHECK(survivors(options, logits_of({0.5, 0.2, 0.2, 0.1})) == Tokens{0, 1, 2});
  }
}

TEST_CASE("the penalty divides positive logits and multiplies negative ones") {
  SamplerOptions options = plain();
  options.repeat_penalty = 2;
  Sampler sampler(options, 4);
  sampler.accept(0);
  sampler.accept(1);
  sampler.accept(0);  // twice has the same effect as once
  const auto e = [](double x) { return std::exp(x); };
  check_frequencies(draw(sampler, {2, -0.5f, 0.5f, 1}, 50'000), {e(1), e(-1), e(0.5), e(1)});

  options.repeat_penalty = 0.5f;  // below 1 it favors repetition
  Sampler rewarding(options, 2);
  rewarding.accept(1);
  check_frequencies(draw(rewarding, {1, 1}, 50'000), {e(1), e(2)});
}

TEST_CASE("only the last repeat_last_n tokens are penalized") {
  SamplerOptions options = plain();
  options.temperature = 0;
  options.repeat_penalty = 10;
  const auto best_after = [&](int32_t last_n, const Tokens& text) {
    options.repeat_last_n = last_n;
    Sampler sampler(options, 4);
    for (const int32_t token : text) sampler.accept(token);
    return sampler.sample(std::vector<float>{8, 7, 6, 5});
  };
  CHECK(best_after(2, {}) == 0);
  CHECK(best_after(2, {0}) == 1);
  CHECK(best_after(2, {0, 1}) == 2);
  CHECK(best_after(2, {0, 1, 2}) == 0);     // token 0 is outside the window
  CHECK(best_after(2, {0, 1, 2, 0}) == 1);  // and inside again; token 1 is outside
  CHECK(best_after(2, {0, 0, 1}) == 2);  // one of its two occurrences is outside, the other is not
  CHECK(best_after(2, {0, 0, 1, 3}) == 0);
  CHECK(best_after(1, {0, 1}) == 0);
  CHECK(best_after(0, {0, 1}) == 0);   // none
  CHECK(best_after(-1, {0, 1}) == 2);  // all
  Tokens text(200, 3);
  text[0] = 0;
  CHECK(best_after(-1, text) == 1);
  CHECK(best_after(199, text) == 0);
  CHECK(best_after(200, text) == 1);
}

TEST_CASE("options out of range are rejected") {
  const auto refused = [](auto change) {
    SamplerOptions options;
    change(options);
    CHECK_THROWS_AS(Sampler(options, 10), InvalidArgument);
  };
  for (const float x : {-0.1f, kNaN, kInfinity, -kInfinity}) {
    refused([x](SamplerOptions& o) { o.temperature = x; });
    refused([x](SamplerOptions& o) { o.top_p = x; });
    refused([x](SamplerOptions& o) { o.min_p = x; });
    refused([x](SamplerOptions& o) { o.repeat_penalty = x; });
  }
  refused([](SamplerOptions& o) { o.top_k = -1; });
  refused([](SamplerOptions& o) { o.top_p = 0; });
  refused([](SamplerOptions& o) { o.top_p = 1.001f; });
  refused([](SamplerOptions& o) { o.min_p = 1.001f; });
  refused([](SamplerOptions& o) { o.repeat_penalty = 0; });
  refused([](SamplerOptions& o) { o.repeat_last_n = -2; });

  CHECK_NOTHROW(Sampler({}, 10));
  Sampler sampler(plain(), 10);
  CHECK_THROWS_AS(sampler.sample(std::vector<float>(9)), InvalidArgument);
  CHECK_THROWS_AS(sampler.sample(std::vector<float>(11)), InvalidArgument);
  SamplerOptions penalizing = plain();
  penalizing.repeat_penalty = 2;
  Sampler strict(penalizing, 10);
  CHECK_THROWS_AS(strict.accept(10), InvalidArgument);
  CHECK_THROWS_AS(strict.accept(-1), InvalidArgument);
}

TEST_CASE("a logit of minus infinity forbids its token") {
  const std::vector<float> logits = {1, -kInfinity, 2, -kInfinity, 0};
  CHECK(survivors(plain(), logits) == Tokens{0, 2, 4});
  CHECK(survivors(SamplerOptions{}, logits) == Tokens{0, 2, 4});
}

}  // namespace
}  // namespace h2o
