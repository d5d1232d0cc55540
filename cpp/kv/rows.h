// Access to the rows of one kv_head, in slots or in the staged chunk.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv/view.h"

namespace h2o {

// One token's row. Arrays that the policy does not use are nullptr.
struct KvRow {
  std::byte* k;
  std::byte* v;
  float* score;
  float* value_norm;
};

H2O_HD inline KvRow slot_row(const KvView& cache, const KvHead& head, int64_t slot) {
  return {head.k + slot * cache.k_row_bytes, head.v + slot * cache.v_row_bytes,
          head.scores != nullptr ? head.scores + slot : nullptr,
          head.value_norms != nullptr ? head.value_norms + slot : nullptr};
}

H2O_HD inline KvRow chunk_row(const KvView& cache, const KvHead& head, const KvStaging& chunk,
                              int64_t row) {
  return {chunk.k + row * cache.k_row_bytes, chunk.v + row * cache.v_row_bytes,
          head.scores != nullptr ? chunk.scores + row : nullptr,
          head.value_norms != nullptr ? chunk.value_norms + row : nullptr};
}

}  // namespace h2o
