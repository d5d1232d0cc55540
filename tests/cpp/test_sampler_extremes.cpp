// Sampler: any logits and valid options give a token that is allowed. Run under sanitizers.
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
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kSmallest = std::numeric_limits<float>::denorm_min();

// No filtering and no scaling.
SamplerOptions plain() { return {.temperature = 1, .top_k = 0, .top_p = 1, .min_p = 0}; }

TEST_CASE("non-finite logits still give a token") {
  std::mt19937 random(1);
  for (const float odd : {kNaN, -kNaN, kInfinity, -kInfinity}) {
    for (const int every : {1, 2, 3, 50}) {
      for (const bool filtered : {false, true}) {
        SamplerOptions options = filtered ? SamplerOptions{} : plain();
        options.repeat_penalty = 1.5f;
        for (const float temperature : {0.0f, 1.0f, kSmallest}) {
          options.temperature = temperature;
          Sampler sampler(options, 100);
          for (int i = 0; i < 20; ++i) {
            std::vector<float> logits(100);
            for (size_t j = 0; j < logits.size(); ++j) {
              logits[j] = random() % every == 0 ? odd : static_cast<float>(random() % 1000) / 100;
            }
            const int32_t token = sampler.sample(logits);
            CHECK(token >= 0);
            CHECK(token < 100);
            sampler.accept(token);
          }
        }
      }
    }
  }
}

// Where infinity minus infinity would be NaN.
TEST_CASE("extreme penalties and biases still give an allowed token") {
  std::vector<float> logits(100, 1.0f);
  logits[3] = kInfinity;
  logits[4] = -kInfinity;
  logits[5] = kNaN;
  for (const float penalty : {kLargest, -kLargest}) {
    for (const float repeat : {1.0f, kLargest, kSmallest}) {
      for (const float temperature : {0.0f, 1.0f, kSmallest, kLargest}) {
        for (const bool filtered : {false, true}) {
          SamplerOptions options = filtered ? SamplerOptions{} : plain();
          options.temperature = temperature;
          options.repeat_penalty = repeat;
          options.frequency_penalty = options.presence_penalty = penalty;
          options.logit_bias = {{6, -kInfinity}, {7, kLargest}, {8, -kLargest}};
          options.dry_multiplier = kLargest;
          options.dry_base = kLargest;
          for (const int32_t n_seen : {0, 3, 9}) {
            Sampler sampler(options, 100);
            for (int32_t i = 0; i < 3 * n_seen; ++i) sampler.accept(i % n_seen);
            for (int i = 0; i < 3; ++i) {
              const int32_t token = sampler.sample(logits);
              CHECK(token >= 0);
              CHECK(token < 100);
              CHECK(token != 6);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a bias of minus infinity for every token is rejected, whatever the penalties") {
  for (const float penalty : {0.0f, -kLargest}) {
    SamplerOptions options = plain();
    options.frequency_penalty = penalty;
    for (int32_t token = 0; token < 40; ++token) options.logit_bias.push_back({token, -kInfinity});
    for (const float temperature : {0.0f, 1.0f}) {
      options.temperature = temperature;
      Sampler sampler(options, 40);
      for (int32_t i = 0; i < 80; ++i) sampler.accept(i % 40);
      CHECK_THROWS_AS(sampler.sample(std::vector<float>(40, 1.0f)), InvalidArgument);
    }
  }
}

// One of these, at random.
template <class T, size_t n>
T one_of(std::mt19937& random, const T (&values)[n]) {
  return values[random() % n];
}

SamplerOptions random_extremes(std::mt19937& random) {
  const auto amount = [&] { return one_of(random, {0.0f, kSmallest, 0.5f, 3.0f, kLargest}); };
  const auto share = [&] { return one_of(random, {0.0f, kSmallest, 0.1f, 0.5f, 1.0f}); };
  const auto part = [&] {
    return one_of(random, {kSmallest, 0.5f, std::nextafter(1.0f, 0.0f), 1.0f});
  };
  const auto penalty = [&] {
    return one_of(random, {-kLargest, -1.0f, 0.0f, 0.0f, 1.0f, kLargest});
  };
  SamplerOptions o;
  o.temperature = amount();
  o.top_k = one_of(random, {0, 1, 2, 50, 1050, std::numeric_limits<int32_t>::max()});
  o.top_p = part();
  o.min_p = share();
  o.repeat_penalty = one_of(random, {kSmallest, 1.0f, 1.0f, 1.5f, kLargest});
  o.repeat_last_n = one_of(random, {-1, 0, 1, 5, std::numeric_limits<int32_t>::max()});
  o.seed = random();
  o.frequency_penalty = penalty();
  o.presence_penalty = penalty();
  o.dry_multiplier = amount();
  o.dry_base = one_of(random, {1.0f, 1.75f, kLargest});
  o.dry_allowed_length = one_of(random, {1, 2, std::numeric_limits<int32_t>::max()});
  o.dry_penalty_last_n = one_of(random, {-1, 0, 1, 5, std::numeric_limits<int32_t>::max()});
  o.typical_p = part();
  o.top_n_sigma = amount();
  o.xtc_probability = share();
  o.xtc_threshold = share();
  o.dynatemp_range = amount();
  o.dynatemp_exponent = amount();
  o.mirostat = one_of(random, {0, 0, 1, 2});
  o.mirostat_tau = amount();
  o.mirostat_eta = amount();
  if (random() % 2 == 0) {  // another order
    std::vector<SamplerStep> steps(llama_cpp_steps().begin(), llama_cpp_steps().end());
    std::shuffle(steps.begin() + 2, steps.end(), random);  // after the penalties
    steps.resize(2 + random() % (steps.size() - 1));
    o.samplers = steps;
  }
  return o;
}

TEST_CASE("any options and logits give an allowed token, as often as they are asked") {
  constexpr float kOdd[] = {0.0f, -0.0f,     1.0f,     -1.0f,      20.0f,     kSmallest,
                            kNaN, kInfinity, kLargest, -kInfinity, -kLargest, -kSmallest};
  std::mt19937 random(5);
  for (int i = 0; i < 3000; ++i) {
    CAPTURE(i);
    const int32_t n_vocab = one_of(random, {1, 2, 33, 100, 100, 1100});
    SamplerOptions options = random_extremes(random);
    for (int32_t token = 0; token < n_vocab && random() % 4 != 0; token += 3) {
      options.logit_bias.push_back(
          {token, one_of(random, {-kInfinity, -kLargest, 2.0f, kLargest})});
    }
    std::vector<uint32_t> mask;
    if (random() % 2 == 0) {
      mask.resize((n_vocab + 31) / 32);
      for (uint32_t& word : mask) word = random();
    }
    const auto allows = [&](int32_t token) {
      const bool in_mask = mask.empty() || (mask[token / 32] >> (token % 32) & 1) != 0;
      return in_mask && std::ranges::none_of(options.logit_bias, [&](const LogitBias& b) {
               return b.token == token && b.bias == -kInfinity;
             });
    };
    bool any = false;
    for (int32_t token = 0; token < n_vocab; ++token) any = any || allows(token);

    Sampler sampler(options, n_vocab);
    const bool even = random() % 4 == 0;  // logits that are all the same
    std::vector<float> logits(n_vocab, kOdd[random() % std::size(kOdd)]);
    for (int step = 0; step < 8; ++step) {
      for (float& logit : logits) {
        if (even) break;
        logit = random() % 2 == 0 ? one_of(random, kOdd) : static_cast<float>(random() % 100) / 9;
      }
      if (!any) {
        CHECK_THROWS_AS(sampler.sample(logits, mask), InvalidArgument);
        break;
      }
      const int32_t token = sampler.sample(logits, mask);
      REQUIRE(token >= 0);
      REQUIRE(token < n_vocab);
      CHECK(allows(token));
      sampler.accept(token);
    }
  }
}

}  // namespace
}  // namespace h2o
