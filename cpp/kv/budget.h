// Budgets: the policy for a part of the context, as in the paper's "H2O (20%)".
#pragma once

#include <optional>
#include <string>
#include <variant>

#include "kv/policy.h"

namespace h2o {

// A number of tokens, or a fraction of n_ctx from 0 to 1.
using Amount = std::variant<int64_t, double>;

// Members have the names that users give them.
struct Budget {
  std::optional<Amount> hh = {};           // all kept tokens; none: everything is kept
  std::optional<Amount> recent = {};       // the recent ones of them; none: half
  int32_t n_sinks = 0;                     // the first ones of them
  std::optional<std::string> policy = {};  // a name, see named_policy(): divides hh instead
};

// A fraction of n tokens. The product in double precision is rounded down, as by H2O's authors:
// 0.29 of 100 is 28.
int64_t fraction_of(int64_t n, double fraction);

// A budget of more than n_ctx tokens is the full cache, which needs no scores. Throws
// InvalidArgument if hh keeps no token or is one token as a number (which 1.0 is easily mistaken
// for), if its parts are more than hh or are given without it, and if recent or n_sinks are given
// together with a policy's name.
KvPolicy budget_policy(const Budget& budget, int32_t n_ctx);

// Tokens of a prompt that are never evicted.
struct Protection {
  int32_t first = 0;
  int32_t last = 0;
};

// The policy with the same budget that keeps these tokens of a prompt of n_prompt tokens; its heavy
// hitters and recent tokens share the rest as before. The same policy if it keeps everything.
// Throws InvalidArgument if there is no rest.
KvPolicy protected_policy(const KvPolicy& policy, const Protection& protection, int32_t n_prompt);

// Is `policy` what protected_policy() makes of `base` for some prompt?
bool is_protected(const KvPolicy& policy, const KvPolicy& base);

}  // namespace h2o
