// Counts what this executable allocates, by operator new, malloc or calloc, and makes it fail. What
// shared libraries allocate by malloc is not counted.
#pragma once

#include <cstdint>

namespace h2o {

// How often any thread has allocated so far.
int64_t allocations();

// While it lives this thread's n-th allocation (from 1) fails, or all from there on.
class FailingAllocation {
 public:
  explicit FailingAllocation(int64_t n, bool only = true);
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;

  // Has it come to that?
  bool failed() const;
};

}  // namespace h2o
