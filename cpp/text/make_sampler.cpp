#include "text/make_sampler.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace h2o {
namespace {

// Flags tokens that contain one of the strings.
std::vector<uint8_t> tokens_with(const Tokenizer& tokenizer, int32_t n_vocab,
                                 std::span<const std::string_view> strings) {
  std::vector<uint8_t> found(static_cast<size_t>(n_vocab));
  for (int32_t token = 0; token < n_vocab; ++token) {
    const std::string_view bytes = tokenizer.token_bytes(token);
    found[static_cast<size_t>(token)] = std::ranges::any_of(strings, [&](std::string_view s) {
      return !s.empty() && bytes.find(s) != std::string_view::npos;
    });
  }
  return found;
}

}  // namespace

Sampler make_sampler(SamplerOptions options, const Tokenizer& tokenizer, int32_t n_vocab,
                     int32_t n_ctx) {
  if (options.dry_penalty_last_n < 0) options.dry_penalty_last_n = n_ctx;
  for (const int32_t token : tokenizer.vocabulary().suppressed) {
    std::erase_if(options.logit_bias, [&](const LogitBias& b) { return b.token == token; });
    options.logit_bias.push_back({token, -std::numeric_limits<float>::infinity()});
  }
  Sampler sampler(options, n_vocab);
  if (!sampler.options().uses_dry()) return sampler;
  if (!options.dry_breakers) {
    sampler.set_dry_breakers(tokens_with(tokenizer, n_vocab, dry_breaker_strings()));
  } else {
    const std::vector<std::string_view> strings(options.dry_breakers->begin(),
                                                options.dry_breakers->end());
    sampler.set_dry_breakers(tokens_with(tokenizer, n_vocab, strings));
  }
  return sampler;
}

}  // namespace h2o
