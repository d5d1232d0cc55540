// h2o_sampling: its defaults are the engine's, and its options reach the sampler.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "capi_rig.h"
#include "text/sampler_options.h"

namespace h2o {
namespace {

// The tokens that continue a prompt.
std::vector<int32_t> tokens_with(const h2o_sampling& sampling) {
  const api::Model model = load_model();
  api::Session session(model, with_budget(0));
  session.set_sampling(sampling);
  streamed(session, "The old man", up_to(24));
  return session.tokens();
}

h2o_sampling greedy() {
  h2o_sampling sampling = H2O_SAMPLING;
  sampling.temperature = 0;
  return sampling;
}

TEST_CASE("the C API's defaults are those of the engine") {
  const h2o_sampling c = H2O_SAMPLING;
  const SamplerOptions o;
  CHECK(c.size == sizeof c);
  CHECK(c.temperature == o.temperature);
  CHECK(c.top_k == o.top_k);
  CHECK(c.top_p == o.top_p);
  CHECK(c.min_p == o.min_p);
  CHECK(c.repeat_penalty == o.repeat_penalty);
  CHECK(c.repeat_last_n == o.repeat_last_n);
  CHECK(c.seed == o.seed);
  CHECK(c.frequency_penalty == o.frequency_penalty);
  CHECK(c.presence_penalty == o.presence_penalty);
  CHECK(c.dry_multiplier == o.dry_multiplier);
  CHECK(c.dry_base == o.dry_base);
  CHECK(c.dry_allowed_length == o.dry_allowed_length);
  CHECK(c.dry_penalty_last_n == o.dry_penalty_last_n);
  CHECK(c.dry_breakers == nullptr);
  CHECK(c.typical_p == o.typical_p);
  CHECK(c.top_n_sigma == o.top_n_sigma);
  CHECK(c.xtc_probability == o.xtc_probability);
  CHECK(c.xtc_threshold == o.xtc_threshold);
  CHECK(c.dynatemp_range == o.dynatemp_range);
  CHECK(c.dynatemp_exponent == o.dynatemp_exponent);
  CHECK(c.mirostat == o.mirostat);
  CHECK(c.mirostat_tau == o.mirostat_tau);
  CHECK(c.mirostat_eta == o.mirostat_eta);
  CHECK(c.samplers == nullptr);
  CHECK(c.n_logit_bias == 0);
}

TEST_CASE("biases, penalties and the order of samplers reach the sampler") {
  const std::vector<int32_t> plain = tokens_with(greedy());
  h2o_sampling biased = greedy();
  const h2o_logit_bias bias = {plain.back(), -std::numeric_limits<float>::infinity()};
  biased.logit_bias = &bias;
  biased.n_logit_bias = 1;
  const std::vector<int32_t> without = tokens_with(biased);
  CHECK(std::ranges::find(without, plain.back()) == without.end());

  h2o_sampling penalized = greedy();
  penalized.frequency_penalty = 3;
  CHECK(tokens_with(penalized) != plain);

  h2o_sampling dry = greedy();
  dry.dry_multiplier = 5;
  const char* const breakers[] = {"~"};
  dry.dry_breakers = breakers;
  dry.n_dry_breakers = 1;
  CHECK(tokens_with(dry) != plain);

  h2o_sampling first = H2O_SAMPLING;  // greedy, whatever the temperature
  const int32_t samplers[] = {H2O_SAMPLER_TOP_K};
  first.samplers = samplers;
  first.n_samplers = 1;
  first.top_k = 1;
  CHECK(tokens_with(first) == plain);
}

TEST_CASE("a program built before these options gets their defaults") {
  h2o_sampling old = greedy();
  old.size = offsetof(h2o_sampling, frequency_penalty);
  old.frequency_penalty = 3;  // past the end of the old structure
  CHECK(tokens_with(old) == tokens_with(greedy()));
}

TEST_CASE("options out of range are rejected") {
  const api::Model model = load_model();
  api::Session session(model, with_budget(0));
  const int32_t unknown[] = {9};
  h2o_sampling sampling = H2O_SAMPLING;
  sampling.samplers = unknown;
  sampling.n_samplers = 1;
  CHECK_THROWS(session.set_sampling(sampling));
  sampling.n_samplers = -1;
  CHECK_THROWS(session.set_sampling(sampling));
  sampling = H2O_SAMPLING;
  sampling.n_samplers = 1;  // without an array
  CHECK_THROWS(session.set_sampling(sampling));
  sampling = H2O_SAMPLING;
  sampling.n_dry_breakers = 1;
  CHECK_THROWS(session.set_sampling(sampling));
  sampling = H2O_SAMPLING;
  sampling.n_logit_bias = 1;
  CHECK_THROWS(session.set_sampling(sampling));
  const h2o_logit_bias bias = {1 << 30, 1};
  sampling.logit_bias = &bias;
  CHECK_THROWS(session.set_sampling(sampling));
  sampling = H2O_SAMPLING;
  sampling.mirostat = 3;
  CHECK_THROWS(session.set_sampling(sampling));
}

}  // namespace
}  // namespace h2o
