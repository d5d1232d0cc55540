// Log-probabilities: those of softmax, and a number or minus infinity for any logits.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "text/sampler.h"
#include "text/trace.h"

namespace h2o {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TokenLogprob traced(const std::vector<float>& logits, int32_t token, int32_t n_top) {
  Trace trace({.n_top = n_top});
  trace.add(logits, token);
  return trace.logprobs(0, 1).at(0);
}

TEST_CASE("log-probabilities are relative to all logits, the largest first") {
  const TokenLogprob found = traced({0, std::log(3.0f), std::log(4.0f), -kInfinity}, 1, 4);
  CHECK(found.token == 1);
  CHECK(found.logprob == doctest::Approx(std::log(3.0 / 8)));
  REQUIRE(found.top.size() == 4);
  CHECK(found.top[0].first == 2);
  CHECK(found.top[0].second == doctest::Approx(std::log(0.5)));
  CHECK(found.top[1] == std::pair(1, found.logprob));
  CHECK(found.top[2].first == 0);
  CHECK(found.top[3] == std::pair<int32_t, double>(3, -kInfinity));
}

TEST_CASE("log-probabilities are those that the sampler draws by, if logits are not finite") {
  const auto check = [](const std::vector<float>& logits, const std::vector<int32_t>& likely) {
    const double each = -std::log(static_cast<double>(likely.size()));
    Sampler sampler({.temperature = 1, .top_k = 0, .top_p = 1, .min_p = 0}, std::ssize(logits));
    for (int i = 0; i < 20; ++i) {
      const int32_t token = sampler.sample(logits);
      CHECK(std::ranges::find(likely, token) != likely.end());
      const TokenLogprob found = traced(logits, token, 2);
      CHECK(found.logprob == doctest::Approx(each));
      REQUIRE(found.top.size() == 2);
      CHECK(found.top[0].first == likely[0]);
      CHECK(found.top[0].second == doctest::Approx(each));
      CHECK_FALSE(std::isnan(found.top[1].second));
    }
  };
  check({kNaN, 2, kNaN, -kInfinity, 2}, {1, 4});
  check({kNaN, 1, kInfinity, kInfinity, kNaN}, {2, 3});
  check({kNaN, -kInfinity, kNaN}, {0, 1, 2});
  check({1, kNaN}, {0});
}

}  // namespace
}  // namespace h2o
