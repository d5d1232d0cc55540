// What changes logits between the product of query and key and the softmax; see Attention.
#pragma once

#include <cfloat>
#include <numbers>

#include "backend/backend.h"
#include "cuda/runtime/ptx.cuh"

namespace h2o::cuda {

// The sinks do not change logits: the softmax begins with them.
struct LogitChanges {
  // Logits are so many times what Attention says: 1 where powers are of e, log2(e) where they are
  // of 2.
  LogitChanges(const Attention& attention, float unit)
      : unit(unit),
        softcap(attention.softcap * unit),
        softcap_rate(softcap > 0 ? 2 * std::numbers::log2e_v<float> / softcap : 0),
        sinks(attention.sinks ? attention.sinks.floats() : nullptr),
        slopes(attention.slopes ? attention.slopes.floats() : nullptr) {}

  __device__ bool any() const { return softcap > 0 || slopes != nullptr; }

  // softcap * tanh(logit / softcap), off by at most 15 roundings of softcap.
  __device__ float capped(float logit) const {
    return softcap - __fdividef(2 * softcap, 1 + exp2_fast(logit * softcap_rate));
  }

  // The logit of a head for the key of a token that is `distance()` before the query.
  template <class Distance>
  __device__ float changed(float logit, int head, const Distance& distance) const {
    if (slopes != nullptr) logit -= slopes[head] * unit * static_cast<float>(distance());
    return softcap > 0 ? capped(logit) : logit;
  }

  // The sink of a head; -FLT_MAX for NaN, as on the CPU.
  __device__ float sink(int head) const {
    return fminf(fmaxf(sinks[head] * unit, -FLT_MAX), FLT_MAX);
  }

  float unit;
  float softcap;       // 0: none
  float softcap_rate;  // what turns a logit into the exponent of 2 of e^(2 logit / softcap)
  const float* sinks;  // [n_heads] or nullptr
  const float* slopes;
};

}  // namespace h2o::cuda
