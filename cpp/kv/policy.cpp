#include "kv/policy.h"

#include "core/error.h"

namespace h2o {

void validate(const KvPolicy& policy) {
  require(policy.sinks >= 0 && policy.heavy >= 0 && policy.recent >= 0, "sinks ", policy.sinks,
          ", heavy ", policy.heavy, ", recent ", policy.recent, ": none may be negative");
  require(policy.budget() >= 1,
          "the policy has sinks + heavy + recent = 0, expected to keep a token");
  require(policy.decay >= 0 && policy.decay <= 1, "decay is ", policy.decay, ", expected 0 to 1");
}

}  // namespace h2o
