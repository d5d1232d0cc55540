// Records on one thread what a forward pass hands to its threads.
#pragma once

#include <vector>

namespace h2o {

// One job of a ThreadPool, as so many threads would divide it; seconds of processor time.
struct TracedJob {
  double before;               // of the caller alone, since the job before
  std::vector<double> parts;   // in the order in which threads take them
  std::vector<double> finish;  // of each part, in order; empty if there is none
};

struct Trace {
  std::vector<TracedJob> jobs;
  double after = 0;
};

// Runs `pass`, whose pools divide their work as for n_threads, at most those they were made for.
template <class Pass>
Trace trace(int n_threads, const Pass& pass);

void begin_trace(int n_threads);
Trace end_trace();

template <class Pass>
Trace trace(int n_threads, const Pass& pass) {
  begin_trace(n_threads);
  pass();
  return end_trace();
}

}  // namespace h2o
