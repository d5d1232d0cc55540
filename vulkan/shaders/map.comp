// x = f(x), or f(x, gate), element by element.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint OPERATION = 0;  // as Map in operations.cpp

layout(push_constant, scalar) uniform Push {
  uint64_t x, gate;
  int64_t n;
  float f[4];  // parameters
};

float gelu_tanh(float v) {
  return v * sigmoid(2.0 * 0.7978845608 * fma(0.044715 * v * v, v, v));
}

// x / 2 * (1 + erf(x / sqrt(2))) = max(x, 0) - |x| / 2 * erfc(|x| / sqrt(2)), by the erfc of
// Numerical Recipes in Chebyshev form (relative error 1.2e-7).
float gelu_erf(float v) {
  if (is_nan(v)) return v;
  const float z = abs(v) * 0.70710678;
  const float t = 1.0 / (1.0 + 0.5 * z);
  float p = fma(t, 0.17087277, -0.82215223);
  p = fma(p, t, 1.48851587);
  p = fma(p, t, -1.13520398);
  p = fma(p, t, 0.27886807);
  p = fma(p, t, -0.18628806);
  p = fma(p, t, 0.09678418);
  p = fma(p, t, 0.37409196);
  p = fma(p, t, 1.00002368);
  p = fma(p, t, -1.26551223);
  const float erfc = z > 9.0 ? 0.0 : t * exp_of(fma(-z, z, p));
  return max(v, 0.0) - 0.5 * abs(v) * erfc;
}

float xielu(float v) {
  const float low = v < f[3] ? v : f[3];
  const float bent = v > 0.0 ? f[0] * v * v : f[1] * (expm1_of(low) - v);
  return fma(f[2], v, bent);
}

float swiglu_clamped(float up, float v) {
  v = v > 7.0 ? 7.0 : v;  // NaN stays NaN
  up = up > 7.0 ? 7.0 : up < -7.0 ? -7.0 : up;
  return (up + 1.0) * (v * sigmoid(1.702 * v));
}

float changed(float v, float g) {
  switch (OPERATION) {
    case 0:
      return v > 0.0 ? v : 0.0;
    case 1:
      return v > 0.0 ? v * v : 0.0;
    case 2:
      return gelu_tanh(v);
    case 3:
      return gelu_erf(v);
    case 4:
      return xielu(v);
    case 5:
      return min(max(v, -f[0]), f[0]);
    case 6:
      return v * f[0];
    case 7:
      return f[0] * tanh_of(v / f[0]);
    case 8:
      return v + g;
    case 9:
      return v * (g * sigmoid(g));
    case 10:
      return swiglu_clamped(v, g);
    case 11:
      return v * gelu_tanh(g);
    case 12:
      return v * sigmoid(g);
    default:
      return v * g;
  }
}

void main() {
  const int64_t stride = int64_t(gl_NumWorkGroups.x) * 128;
  for (int64_t i = gl_GlobalInvocationID.x; i < n; i += stride) {
    Floats to = floats(x, i);
    to.at[0] = changed(to.at[0], OPERATION >= 8 ? floats(gate, i).at[0] : 0.0);
  }
}
