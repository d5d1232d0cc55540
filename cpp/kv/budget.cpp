#include "kv/budget.h"

#include <algorithm>

#include "core/error.h"
#include "kv/names.h"

namespace h2o {
namespace {

// "0.2", "1.0", "400": a fraction cannot be mistaken for tokens.
std::string shown(const Amount& amount) {
  if (const auto* const tokens = std::get_if<int64_t>(&amount)) return concat(*tokens);
  std::string number = concat(std::get<double>(amount));
  if (number.find_first_of(".en") == number.npos) number += ".0";  // not of 1e-09, nan, inf
  return number;
}

std::string shown(const std::string& policy) {
  return "policy=" + h2o::quoted(policy);  // not std::quoted
}

int64_t tokens_of(const char* name, const Amount& amount, int32_t n_ctx) {
  const auto* const tokens = std::get_if<int64_t>(&amount);
  if (tokens != nullptr && *tokens >= 0) return *tokens;
  const auto* const fraction = std::get_if<double>(&amount);
  if (fraction != nullptr && *fraction >= 0 && *fraction <= 1) return fraction_of(n_ctx, *fraction);
  throw InvalidArgument(
      concat(name, "=", shown(amount), ", expected a fraction from 0 to 1 or a number of tokens"));
}

// Requires hh, if parts of it are given.
void check_without_hh(const Budget& budget) {
  constexpr const char* kPart = " is a part of hh, which is not given";
  if (budget.recent) throw InvalidArgument(concat("recent=", shown(*budget.recent), kPart));
  require(budget.n_sinks == 0, "n_sinks=", budget.n_sinks, kPart);
  if (!budget.policy) return;
  throw InvalidArgument(concat(shown(*budget.policy), " needs hh, the budget, such as hh=0.2"));
}

}  // namespace

int64_t fraction_of(int64_t n, double fraction) {
  return static_cast<int64_t>(fraction * static_cast<double>(n));
}

KvPolicy budget_policy(const Budget& budget, int32_t n_ctx) {
  const auto& [hh, recent, n_sinks, policy] = budget;
  if (policy) named_policy(*policy, 1);  // checks the name
  if (!hh) {
    check_without_hh(budget);
    return {};
  }
  const int64_t total = tokens_of("hh", *hh, n_ctx);
  const std::string given = "hh=" + shown(*hh);
  require(total != 1 || std::holds_alternative<double>(*hh), given,
          " is one token, expected 1.0 for all of n_ctx, or at least 2 tokens");
  require(total >= 1, given, " keeps no token of n_ctx=", n_ctx, ", expected at least 1");
  if (policy) {
    require(!recent, "give either recent or ", shown(*policy), ", not both");
    require(n_sinks == 0, "give either n_sinks or ", shown(*policy), ", not both");
  }
  require(n_sinks >= 0 && n_sinks < total, "n_sinks=", n_sinks, ", expected 0 to less than the ",
          total, " tokens of ", given);
  const int64_t rest = total - n_sinks;
  const int64_t n_recent = recent ? tokens_of("recent", *recent, n_ctx) : rest - rest / 2;
  if (n_recent > rest) {
    const std::string sinks = n_sinks == 0 ? "" : concat(" besides n_sinks=", n_sinks);
    throw InvalidArgument(concat("recent=", shown(*recent), " is ", n_recent,
                                 " tokens, expected at most the ", rest, " of ", given, sinks));
  }
  if (total > n_ctx) return {};
  if (policy) return named_policy(*policy, static_cast<int32_t>(total));
  return {.sinks = n_sinks,
          .heavy = static_cast<int32_t>(rest - n_recent),
          .recent = static_cast<int32_t>(n_recent)};
}

KvPolicy protected_policy(const KvPolicy& policy, const Protection& protection, int32_t n_prompt) {
  const auto& [first, last] = protection;
  require(first >= 0 && last >= 0, "protect is (", first, ", ", last, "), expected 0 or more");
  if (policy.recent == KvPolicy::kUnbounded) return policy;
  KvPolicy result = policy;
  result.sinks = std::max(policy.sinks, std::min(first, n_prompt));
  const int32_t begin = std::max(n_prompt - std::min(last, n_prompt), result.sinks);
  if (begin < n_prompt) result.tail_begin = begin, result.tail_end = n_prompt;
  const int64_t kept = int64_t{result.sinks} + result.tail_end - result.tail_begin;
  const int64_t rest = policy.budget() - kept;
  require(rest >= 1, "protect keeps ", kept, " tokens of the prompt, expected fewer than the ",
          policy.budget(), " of the budget");
  const int64_t divided = std::max(int64_t{policy.heavy} + policy.recent, int64_t{1});
  const int64_t heavy =
      std::min(rest * policy.heavy / divided, policy.recent > 0 ? rest - 1 : rest);
  result.heavy = static_cast<int32_t>(heavy);
  result.recent = static_cast<int32_t>(rest - heavy) + result.tail_end - result.tail_begin;
  return result;
}

bool is_protected(const KvPolicy& policy, const KvPolicy& base) {
  if (policy == base) return true;
  const int64_t tail = int64_t{policy.tail_end} - policy.tail_begin;
  if (policy.sinks < base.sinks || tail < 0 || policy.sinks + tail >= base.budget()) return false;
  const Protection protection{policy.sinks, static_cast<int32_t>(tail)};
  return protected_policy(base, protection, tail > 0 ? policy.tail_end : INT32_MAX) == policy;
}

}  // namespace h2o
