// A layer with a recurrent state on the test device.
#pragma once

#include <memory>
#include <vector>

#include "device_rig.h"
#include "kv/cache.h"

namespace h2o {

// Has the states of two sequences.
class RecurrentRig {
 public:
  RecurrentRig(int64_t state_floats, int n_threads)
      : backend_(test_backend(n_threads)),
        cache_(*backend_, KvPolicy(),
               {.n_sequences = 2,
                .n_heads = 1,
                .n_kv_heads = 1,
                .head_dim = 32,
                .max_tokens = 64,
                .max_rows = 64,
                .state_floats = {state_floats}}) {}

  void reset() {
    for (const int32_t s : {0, 1}) cache_.reset(s);
  }

 protected:
  Backend& backend() { return *backend_; }

  // The next rows of the sequences in turn, of the given numbers.
  Batch next_batch(const std::vector<int32_t>& n_rows) const {
    Batch batch;
    for (int32_t s = 0; s < std::ssize(n_rows); ++s) {
      if (n_rows[s] > 0) batch.add(s, cache_.length(s), std::vector<int32_t>(n_rows[s]));
    }
    batch.want_last();
    return batch;
  }

  // Calls kernel(layer).
  template <class Kernel>
  void run(const Batch& batch, const Kernel& kernel) {
    backend_->run(batch, [&] { kernel(cache_.layer(0)); });
    cache_.advance(batch);
  }

 private:
  std::unique_ptr<Backend> backend_;
  KvCache cache_;
};

}  // namespace h2o
