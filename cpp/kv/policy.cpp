#include "kv/policy.h"

#include "core/error.h"

namespace h2o {

void validate(const KvPolicy& policy) {
  require(policy.sinks >= 0 && policy.heavy >= 0 && policy.recent >= 0, "[policy] sinks ",
          policy.sinks, ", heavy ", policy.heavy, ", recent ", policy.recent,
          ": none may be negative");
  require(policy.budget() >= 1, "[policy] sinks + heavy + recent is 0: it must keep a token");
  require(policy.decay >= 0 && policy.decay <= 1, "[policy] decay is ", policy.decay,
          ", it must be 0 to 1");
}

}  // namespace h2o
