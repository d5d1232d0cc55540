// Counts this executable's allocations by operator new, malloc or calloc, and makes them fail.
// malloc in shared libraries is not counted.
#pragma once

#include <cstdint>

namespace h2o {

// Number of allocations so far, on any thread.
int64_t allocations();

// During its lifetime this thread's n-th allocation (from 1) fails, or all from there on.
class FailingAllocation {
 public:
  explicit FailingAllocation(int64_t n, bool only = true);
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;

  // Has an allocation failed?
  bool failed() const;
};

}  // namespace h2o
