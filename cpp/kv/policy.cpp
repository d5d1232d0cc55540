#include "kv/policy.h"

#include "core/error.h"

namespace h2o {

void validate(const KvPolicy& policy) {
  require(policy.sinks >= 0 && policy.heavy >= 0 && policy.recent >= 0, "sinks ", policy.sinks,
          ", heavy ", policy.heavy, ", recent ", policy.recent, ": none may be negative");
  const int32_t begin = policy.tail_begin, end = policy.tail_end;
  require(begin >= 0 && begin <= end && end - begin <= policy.recent &&
              (begin == end || begin >= policy.sinks),
          "the tail is from position ", begin, " to ", end, ", expected it after the ",
          policy.sinks, " sinks, with at most ", policy.recent, " tokens, the recent ones");
  require(policy.budget() >= 1,
          "the policy has sinks + heavy + recent = 0, expected to keep a token");
  require(policy.decay >= 0 && policy.decay <= 1, "decay is ", policy.decay, ", expected 0 to 1");
}

}  // namespace h2o
