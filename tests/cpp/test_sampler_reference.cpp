// Compares Sampler with a reference that sorts everything: the same tokens for the same logits,
// options, masks and random numbers.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "allocations.h"
#include "core/error.h"
#include "testing.h"
#include "text/sampler.h"

namespace h2o {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Up to this many candidates Sampler sorts too, and adds weights in the same order.
constexpr size_t kExact = 1024;
// The relative error of a total of approximate weights, with a margin.
constexpr double kTolerance = 3e-7;

using Random = std::mt19937_64;
using Mask = std::vector<uint32_t>;

double uniform(Random& random) { return static_cast<double>(random() >> 11) * 0x1p-53; }
float normal(Random& random) {
  return static_cast<float>(std::sqrt(-2 * std::log(1 - uniform(random))) *
                            std::cos(6.283185307179586 * uniform(random)));
}
template <typename T>
T pick(Random& random, const std::vector<T>& values) {
  return values[random() % values.size()];
}

struct Candidate {
  int32_t token;
  float logit;
};

// The allowed candidates after the penalty, in descending order.
std::vector<Candidate> sorted_candidates(const std::vector<float>& logits, const Mask& allowed,
                                         const std::set<int32_t>& recent, float penalty) {
  std::vector<Candidate> candidates;
  for (int32_t token = 0; token < std::ssize(logits); ++token) {
    if (!allowed.empty() && (allowed[token / 32] >> (token % 32) & 1) == 0) continue;
    float logit = std::isnan(logits[token]) ? -kInfinity : logits[token];
    if (recent.contains(token)) logit = logit > 0 ? logit / penalty : logit * penalty;
    candidates.push_back({token, logit});
  }
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
  });
  return candidates;
}

// The token for a random number from 0 to 1, or the few tokens possible within the rounding of the
// top-p limit.
std::set<int32_t> expected_tokens(const std::vector<Candidate>& candidates, size_t n_vocab,
                                  const SamplerOptions& options, double random) {
  if (options.temperature == 0) return {candidates.front().token};
  const size_t most = options.top_k > 0 ? options.top_k : n_vocab;
  const size_t k = std::min(most, candidates.size());
  std::vector<float> weights;
  double total = 0;
  for (size_t i = 0; i < k; ++i) {
    const float logit = candidates[i].logit;
    const float below = logit == candidates[0].logit ? 0 : logit - candidates[0].logit;
    weights.push_back(std::exp(below / options.temperature));
    total += weights.back();
  }
  const bool exact =
      std::min(most, n_vocab) <= kExact ||
      std::all_of(weights.begin(), weights.end(), [](float w) { return w == 0 || w == 1; });
  const double tolerance = exact ? 0 : kTolerance;
  const auto kept_by = [&](double limit) {
    size_t n = 0;
    for (double mass = 0; n < k && mass < limit; ++n) mass += weights[n];
    while (n > 1 && weights[n - 1] < options.min_p) --n;
    return n;
  };
  const double limit =
      options.top_p < 1 ? options.top_p * static_cast<float>(total) : 2 * total;  // 2: not reached
  std::set<int32_t> tokens;
  const size_t last = kept_by(limit * (1 + tolerance));
  for (size_t n = kept_by(limit * (1 - tolerance)); n <= last; ++n) {
    double left = 0;
    for (size_t i = 0; i < n; ++i) left += weights[i];
    left *= random;
    size_t drawn = 0;
    for (size_t i = 0; i < n; ++i) {
      if (weights[i] > 0) drawn = i;
      left -= weights[i];
      if (left < 0) break;
    }
    tokens.insert(candidates[drawn].token);
  }
  return tokens;
}

struct Distribution {
  const char* name;
  std::function<float(Random&)> logit;
};

const std::vector<Distribution> kDistributions = {
    {"equal", [](Random&) { return 1.5f; }},
    {"nearly flat", [](Random& r) { return 0.01f * normal(r); }},
    {"normal", [](Random& r) { return normal(r); }},
    {"wide", [](Random& r) { return 4 * normal(r) - 7; }},
    {"peaked", [](Random& r) { return r() % 500 == 0 ? 20 + normal(r) : 3 * normal(r); }},
    {"outliers below", [](Random& r) { return r() % 500 == 0 ? -50 : 0.1f * normal(r); }},
    {"ties", [](Random& r) { return static_cast<float>(r() % 30) / 4; }},
    {"two values", [](Random& r) { return r() % 2 == 0 ? -0.5f : 0.25f; }},
    {"three values", [](Random& r) { return static_cast<float>(r() % 3) * 30; }},
    {"both zeros", [](Random& r) { return r() % 2 == 0 ? -0.0f : 0.0f; }},
    {"zeros and tiny",
     [](Random& r) { return std::ldexp(r() % 3 - 1.0f, r() % 2 ? -140 : -9999); }},
    {"tiny", [](Random& r) { return std::ldexp(normal(r), -static_cast<int>(r() % 140)); }},
    {"huge", [](Random& r) { return r() % 2 == 0 ? 3e38f * normal(r) : normal(r); }},
    {"bfloat16", [](Random& r) { return std::round(normal(r) * 64) / 16; }},
    {"all -infinity", [](Random&) { return -kInfinity; }},
    {"all NaN", [](Random&) { return kNaN; }},
    {"some -infinity", [](Random& r) { return r() % 3 == 0 ? -kInfinity : 2 * normal(r); }},
    {"some infinity", [](Random& r) { return r() % 50 == 0 ? kInfinity : normal(r); }},
    {"all infinities", [](Random& r) { return r() % 2 == 0 ? kInfinity : -kInfinity; }},
    {"some NaN", [](Random& r) { return r() % 3 == 0 ? kNaN : 2 * normal(r); }},
};

// Empty, or with at least one token of n_vocab; further bits are ignored.
Mask random_mask(Random& random, int32_t n_vocab) {
  const auto kind = random() % 6;
  if (kind < 3) return {};
  Mask mask((n_vocab + 31) / 32);
  for (uint32_t& word : mask) {
    if (kind == 3) word = ~0u;                                       // all
    if (kind == 4) word = static_cast<uint32_t>(random());           // every other
    if (kind == 5 && random() % 9 == 0) word = 1u << random() % 32;  // few
  }
  const auto token = static_cast<int32_t>(random() % n_vocab);
  mask[token / 32] |= 1u << token % 32;
  return mask;
}

SamplerOptions random_options(Random& random) {
  const float smallest = std::numeric_limits<float>::denorm_min();
  const std::vector<float> temperatures = {0.8f, 1, 0.8f, 1, 0.2f, 5, 0, 1e-3f, 1e30f, smallest};
  return {
      .temperature = pick(random, temperatures),
      .top_k = pick<int32_t>(random, {0, 0, 0, 1, 2, 40, 1023, 1024, 1025, 1500, 7000, 1 << 30}),
      .top_p = pick<float>(random, {1, 1, 0.95f, 0.9f, 0.5f, 0.1f, 1e-6f}),
      .min_p = pick<float>(random, {0, 0, 0.05f, 0.3f, 1, smallest}),
      .seed = random()};
}

struct Tally {
  int draws = 0;
  int wrong = 0;
  int ambiguous = 0;
};

// One vector of logits, with several options.
void compare(Random& random, int32_t n_vocab, const Distribution& distribution, Tally& tally) {
  CAPTURE(n_vocab);
  CAPTURE(distribution.name);
  std::vector<float> logits(n_vocab);
  for (float& logit : logits) logit = distribution.logit(random);
  const Mask allowed = random_mask(random, n_vocab);
  const float penalty = pick<float>(random, {1, 1.3f, 0.5f, 1e30f});
  std::vector<int32_t> accepted(random() % 40);
  for (int32_t& token : accepted) token = static_cast<int32_t>(random() % n_vocab);
  const auto last_n = pick<int32_t>(random, {64, 10, -1, 0});
  const size_t n_recent = last_n < 0 ? accepted.size() : std::min<size_t>(last_n, accepted.size());
  const std::set<int32_t> recent(accepted.end() - n_recent, accepted.end());
  const std::vector<Candidate> candidates = sorted_candidates(logits, allowed, recent, penalty);
  CAPTURE(allowed.size());
  CAPTURE(penalty);

  for (int i = 0; i < 6; ++i) {
    SamplerOptions options = random_options(random);
    options.repeat_penalty = penalty;
    options.repeat_last_n = last_n;
    CAPTURE(options.temperature);
    CAPTURE(options.top_k);
    CAPTURE(options.top_p);
    CAPTURE(options.min_p);
    Sampler sampler(options, n_vocab);
    sampler.accept(accepted);
    Random numbers(options.seed);
    for (int j = 0; j < 3; ++j) {
      const double number = options.temperature > 0 ? uniform(numbers) : 0;
      const std::set<int32_t> tokens = expected_tokens(candidates, n_vocab, options, number);
      const int64_t before = allocations();
      const int32_t token = sampler.sample(logits, allowed);
      REQUIRE(allocations() == before);
      ++tally.draws;
      tally.ambiguous += tokens.size() > 1;
      if (tokens.contains(token)) continue;
      ++tally.wrong;
      CAPTURE(token);
      CAPTURE(*tokens.begin());
      CHECK(tokens.contains(token));
    }
    Sampler same(options, 1);  // exactly these random numbers have been used
    for (int j = 0; j < 3; ++j) same.sample(std::vector<float>{0});
    REQUIRE(sampler.random_state() == same.random_state());
  }
}

void compare_all(const std::vector<int32_t>& sizes, int rounds) {
  if (brief()) rounds = (rounds + 2) / 3;
  Random random(12345);
  Tally tally;
  for (int round = 0; round < rounds; ++round) {
    for (const Distribution& distribution : kDistributions) {
      for (const int32_t n_vocab : sizes) compare(random, n_vocab, distribution, tally);
    }
  }
  MESSAGE(tally.draws << " draws, " << tally.ambiguous << " at a limit within rounding");
  CHECK(tally.wrong == 0);
  CHECK(tally.ambiguous * 50 < tally.draws);
}

TEST_CASE("small vocabularies: the same tokens as a sampler that sorts everything") {
  compare_all({1, 2, 3, 31, 32, 33, 100, 257}, 15);
}

TEST_CASE("vocabularies around the switch to buckets") { compare_all({1023, 1024, 1025, 1100}, 6); }

TEST_CASE("large vocabularies") { compare_all({5000, 20'001}, 3); }

TEST_CASE("a very large vocabulary") { compare_all({200'000}, 1); }

TEST_CASE("every token of a large vocabulary is drawn in proportion to its weight") {
  // Even tokens have twice the weight of the others.
  constexpr int32_t kTokens = 3000;
  std::vector<float> logits(kTokens);
  for (int32_t i = 0; i < kTokens; ++i) logits[i] = i % 2 == 0 ? 0 : -std::log(2.0f);
  Sampler sampler({.temperature = 1, .top_k = 0, .top_p = 1, .min_p = 0}, kTokens);
  std::vector<int> counts(kTokens);
  for (int i = 0; i < 90'000; ++i) ++counts[sampler.sample(logits)];
  int even = 0;
  for (int32_t i = 0; i < kTokens; i += 2) even += counts[i];
  CHECK(std::abs(even - 60'000) < 1000);
  CHECK(*std::min_element(counts.begin(), counts.end()) > 0);
}

TEST_CASE("only allowed tokens are sampled, whatever their logits") {
  const std::vector<float> logits = {5, 4, 3, -kInfinity, kNaN, kInfinity};
  for (const float temperature : {0.0f, 1.0f}) {
    Sampler sampler({.temperature = temperature, .top_k = 0, .top_p = 1, .min_p = 0}, 6);
    for (int32_t token = 0; token < 6; ++token) {
      CHECK(sampler.sample(logits, Mask{1u << token}) == token);
      CHECK(sampler.sample(logits, Mask{1u << token | 0xffffffc0u}) == token);
    }
  }
  Sampler greedy({.temperature = 0}, 6);
  CHECK(greedy.sample(logits, Mask{0b011110}) == 1);
  CHECK(greedy.sample(logits, Mask{0b011000}) == 3);
  CHECK(greedy.sample(logits, Mask{0b111111}) == 5);
}

TEST_CASE("a mask of the wrong size, or that allows no token, is rejected") {
  Sampler sampler({}, 40);
  const std::vector<float> logits(40, 1.0f);
  const std::string state = sampler.random_state();
  for (const Mask& mask : {Mask{1}, Mask{1, 1, 1}, Mask{0, 0}, Mask{0, 0xffffff00u}}) {
    CHECK_THROWS_AS(sampler.sample(logits, mask), InvalidArgument);
  }
  CHECK(sampler.random_state() == state);
  CHECK(sampler.sample(logits, Mask{0, 0x80u}) == 39);
  Sampler whole({}, 32);
  CHECK_THROWS_AS(whole.sample(std::vector<float>(32), Mask{0}), InvalidArgument);
  CHECK(whole.sample(std::vector<float>(32), Mask{0x80000000u}) == 31);
}

}  // namespace
}  // namespace h2o
