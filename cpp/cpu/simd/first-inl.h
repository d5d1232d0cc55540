// The first n < kWidth elements of a vector, for instruction sets without masks.
#pragma once

#include <cstdint>

namespace h2o {
namespace {

template <class T>
Vec load_first(const T* p, int64_t n) {  // then zeros
  T padded[kWidth] = {};
  for (int64_t i = 0; i < n; ++i) padded[i] = p[i];
  return load(padded);
}

void store_first(float* p, Vec v, int64_t n) {
  float all[kWidth];
  store(all, v);
  for (int64_t i = 0; i < n; ++i) p[i] = all[i];
}

}  // namespace
}  // namespace h2o
