#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "core/error.h"
#include "kv/budget.h"
#include "kv/names.h"

namespace h2o {
namespace {

Amount tokens(int64_t n) { return n; }
Amount fraction(double f) { return f; }

std::string refusal(const Budget& budget, int32_t n_ctx) {
  try {
    budget_policy(budget, n_ctx);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

KvPolicy kept(int32_t sinks, int32_t heavy, int32_t recent) {
  return {.sinks = sinks, .heavy = heavy, .recent = recent};
}

TEST_CASE("a budget is half heavy hitters and half recent tokens, besides the sinks") {
  CHECK(budget_policy({}, 2048) == KvPolicy{});
  CHECK(budget_policy({.hh = fraction(0.2)}, 2048) == kept(0, 204, 205));
  CHECK(budget_policy({.hh = fraction(0.29)}, 100) == kept(0, 14, 14));  // 28.999...
  CHECK(budget_policy({.hh = fraction(1)}, 8) == kept(0, 4, 4));
  CHECK(budget_policy({.hh = fraction(0.125)}, 8) == kept(0, 0, 1));
  CHECK(budget_policy({.hh = tokens(7)}, 2048) == kept(0, 3, 4));
  CHECK(budget_policy({.hh = tokens(8), .recent = tokens(0)}, 2048) == kept(0, 8, 0));
  CHECK(budget_policy({.hh = tokens(50), .recent = fraction(0.1)}, 100) == kept(0, 40, 10));
  CHECK(budget_policy({.hh = tokens(10), .n_sinks = 3}, 2048) == kept(3, 3, 4));
  CHECK(budget_policy({.hh = tokens(5), .recent = tokens(3), .n_sinks = 2}, 9) == kept(2, 0, 3));
  CHECK(budget_policy({.hh = tokens(5), .n_sinks = 4}, 2048) == kept(4, 0, 1));
}

TEST_CASE("more tokens than n_ctx are the full cache") {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const int64_t n : {int64_t{101}, int64_t{1} << 32, kMost}) {
    CAPTURE(n);
    CHECK(budget_policy({.hh = tokens(n)}, 100) == KvPolicy{});
    CHECK(budget_policy({.hh = tokens(n), .recent = tokens(n)}, 100) == KvPolicy{});
    CHECK(budget_policy({.hh = tokens(n), .n_sinks = 4}, 100) == KvPolicy{});
    CHECK(budget_policy({.hh = tokens(n), .policy = "window"}, 100) == KvPolicy{});
  }
  CHECK(budget_policy({.hh = tokens(100)}, 100) == kept(0, 50, 50));
  CHECK(budget_policy({.hh = tokens(100), .policy = "window"}, 100) == kept(0, 0, 100));
  CHECK(refusal({.hh = tokens(101), .policy = "lru"}, 100).starts_with("policy='lru', expected"));
  CHECK(refusal({.hh = tokens(101), .n_sinks = -1}, 100).starts_with("n_sinks=-1, expected"));
}

TEST_CASE("refused budgets are told what was expected") {
  const auto a_fraction = [](const std::string& given) {
    return given + ", expected a fraction from 0 to 1 or a number of tokens";
  };
  CHECK(refusal({.hh = fraction(1.5)}, 64) == a_fraction("hh=1.5"));
  CHECK(refusal({.hh = fraction(2)}, 64) == a_fraction("hh=2.0"));
  CHECK(refusal({.hh = fraction(-0.1)}, 64) == a_fraction("hh=-0.1"));
  CHECK(refusal({.hh = fraction(1e300)}, 64) == a_fraction("hh=1e+300"));
  CHECK(refusal({.hh = fraction(std::nan(""))}, 64) == a_fraction("hh=nan"));
  CHECK(refusal({.hh = tokens(-1)}, 64) == a_fraction("hh=-1"));
  CHECK(refusal({.hh = tokens(9), .recent = fraction(1.5)}, 64) == a_fraction("recent=1.5"));

  CHECK(refusal({.hh = fraction(0.0005)}, 1000) ==
        "hh=0.0005 keeps no token of n_ctx=1000, expected at least 1");
  CHECK(refusal({.hh = tokens(0)}, 64) == "hh=0 keeps no token of n_ctx=64, expected at least 1");
  CHECK(refusal({.hh = tokens(1)}, 64) ==
        "hh=1 is one token, expected 1.0 for all of n_ctx, or at least 2 tokens");
  CHECK(refusal({.hh = fraction(0.2), .recent = fraction(0.5)}, 64) ==
        "recent=0.5 is 32 tokens, expected at most the 12 of hh=0.2");
  CHECK(refusal({.hh = tokens(10), .recent = tokens(7), .n_sinks = 4}, 64) ==
        "recent=7 is 7 tokens, expected at most the 6 of hh=10 besides n_sinks=4");
  CHECK(refusal({.hh = tokens(10), .n_sinks = 10}, 64) ==
        "n_sinks=10, expected 0 to less than the 10 tokens of hh=10");

  CHECK(refusal({.recent = fraction(0.1)}, 64) == "recent=0.1 is a part of hh, which is not given");
  CHECK(refusal({.n_sinks = 4}, 64) == "n_sinks=4 is a part of hh, which is not given");
  CHECK(refusal({.policy = "mean"}, 64) == "policy='mean' needs hh, the budget, such as hh=0.2");
  CHECK(refusal({.hh = tokens(9), .recent = tokens(2), .policy = "mean"}, 64) ==
        "give either recent or policy='mean', not both");
  CHECK(refusal({.hh = tokens(9), .n_sinks = 2, .policy = "mean"}, 64) ==
        "give either n_sinks or policy='mean', not both");
}

TEST_CASE("named policies keep the tokens of the budget") {
  for (const std::string_view name : policy_names()) {
    for (const int32_t n : {1, 2, 3, 4, 5, 20, 31, 128, 1001}) {
      CAPTURE(name);
      CAPTURE(n);
      const KvPolicy policy = named_policy(name, n);
      CHECK_NOTHROW(validate(policy));
      CHECK(policy.budget() == n);
    }
    CHECK(budget_policy({.hh = tokens(20), .policy = std::string(name)}, 64) ==
          named_policy(name, 20));
  }
  CHECK(named_policy("h2o", 7) == kept(0, 3, 4));
  CHECK(named_policy("window", 7) == kept(0, 0, 7));
  CHECK(named_policy("sinks", 7) == kept(4, 0, 3));
  CHECK(named_policy("question", 128) == KvPolicy{.heavy = 96,
                                                  .recent = 32,
                                                  .scoring = Scoring::question,
                                                  .decay = 0.95f,
                                                  .value_norm = ValueNorm::output});
  CHECK(
      named_policy("contribution", 7) ==
      KvPolicy{.heavy = 3, .recent = 4, .scoring = Scoring::mean, .value_norm = ValueNorm::output});
  CHECK_THROWS_WITH_AS(named_policy("window", 0),
                       "policy='window' keeps 0 tokens, expected at "
                       "least 1",
                       InvalidArgument);
}

}  // namespace
}  // namespace h2o
