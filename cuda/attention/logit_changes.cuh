// Modifications of logits between the product of query and key and the softmax; see Attention.
#pragma once

#include <cfloat>
#include <numbers>

#include "backend/backend.h"
#include "cuda/runtime/ptx.cuh"

namespace h2o::cuda {

// Sinks do not modify logits: they are the softmax's initial state.
struct LogitChanges {
  // `unit`: scale of the logits: 1 for exponentials to base e, log2(e) for base 2.
  LogitChanges(const Attention& attention, float unit)
      : unit(unit),
        softcap(attention.softcap * unit),
        softcap_rate(softcap > 0 ? 2 * std::numbers::log2e_v<float> / softcap : 0),
        sinks(attention.sinks ? attention.sinks.floats() : nullptr),
        slopes(attention.slopes ? attention.slopes.floats() : nullptr) {}

  __device__ bool any() const { return softcap > 0 || slopes != nullptr; }

  // softcap * tanh(logit / softcap), accurate to 15 roundings of softcap.
  __device__ float capped(float logit) const {
    return softcap - __fdividef(2 * softcap, 1 + exp2_fast(logit * softcap_rate));
  }

  // The logit of a head for the key of a token `distance()` before the query.
  template <class Distance>
  __device__ float changed(float logit, int head, const Distance& distance) const {
    if (slopes != nullptr) logit -= slope(head) * static_cast<float>(distance());
    return softcap > 0 ? capped(logit) : logit;
  }

  __device__ float slope(int head) const { return slopes[head] * unit; }

  // The sink of a head; -FLT_MAX if NaN, as on the CPU.
  __device__ float sink(int head) const {
    return fminf(fmaxf(sinks[head] * unit, -FLT_MAX), FLT_MAX);
  }

  float unit;
  float softcap;       // 0: none
  float softcap_rate;  // converts a logit to the base-2 exponent of e^(2 logit / softcap)
  const float* sinks;  // [n_heads] or nullptr
  const float* slopes;
};

}  // namespace h2o::cuda
