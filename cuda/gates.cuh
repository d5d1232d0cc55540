// Activations and gates, shared by all kernels that apply them, so that results are bit-identical.
#pragma once

#include "backend/backend.h"

namespace h2o::cuda {

// e^-|x| never overflows.
__device__ inline float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0 ? e : 1) / (1 + e);
}

// x / 2 * (1 + tanh(u)) = x * sigmoid(2 u)
struct GeluTanh {
  __device__ float operator()(float x) const {
    return x * sigmoid(2 * 0.7978845608f * fmaf(0.044715f * x * x, x, x));
  }
};

// Each Gate as a function.
struct Swiglu {
  __device__ float operator()(float up, float gate) const { return up * (gate * sigmoid(gate)); }
};

struct SwigluClamped {
  __device__ float operator()(float up, float gate) const {
    gate = gate > 7 ? 7 : gate;  // NaN stays NaN
    up = up > 7 ? 7 : up < -7 ? -7 : up;
    return (up + 1) * (gate * sigmoid(1.702f * gate));
  }
};

struct Geglu {
  __device__ float operator()(float up, float gate) const { return up * GeluTanh{}(gate); }
};

struct SigmoidGate {
  __device__ float operator()(float up, float gate) const { return up * sigmoid(gate); }
};

__device__ inline float gated(Gate kind, float up, float gate) {
  if (kind == Gate::swiglu) return Swiglu{}(up, gate);
  if (kind == Gate::geglu) return Geglu{}(up, gate);
  if (kind == Gate::sigmoid) return SigmoidGate{}(up, gate);
  return SwigluClamped{}(up, gate);
}

}  // namespace h2o::cuda
