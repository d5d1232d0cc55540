// Included by all shaders: arrays at device addresses, and arithmetic that does not depend on the
// driver.
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_scalar_block_layout : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_shader_8bit_storage : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : require
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require

const int kSegmentBytes = 24;  // sizeof(Segment) of backend/batch.h

layout(buffer_reference, scalar, buffer_reference_align = 4) buffer Floats { float at[]; };
layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer Vec4s { vec4 at[]; };
layout(buffer_reference, scalar, buffer_reference_align = 4) buffer Ints { int at[]; };
layout(buffer_reference, scalar, buffer_reference_align = 4) buffer Words { uint at[]; };
layout(buffer_reference, scalar, buffer_reference_align = 8) buffer Longs { uint64_t at[]; };
layout(buffer_reference, scalar, buffer_reference_align = 2) buffer Shorts { uint16_t at[]; };
layout(buffer_reference, scalar, buffer_reference_align = 1) buffer Bytes { uint8_t at[]; };

// Device addresses are 64-bit integers; 0 means nullptr. Element i of arrays of 4 bytes, and row i.
Floats floats(uint64_t address, int64_t i) { return Floats(address + uint64_t(4 * i)); }
Ints ints(uint64_t address, int64_t i) { return Ints(address + uint64_t(4 * i)); }

// GLSL leaves min, max and comparisons of NaN to the driver.
bool is_nan(float x) { return (floatBitsToUint(x) & 0x7fffffffu) > 0x7f800000u; }
float infinity() { return uintBitsToFloat(0x7f800000u); }
float largest_float() { return uintBitsToFloat(0x7f7fffffu); }

// e^x to about 1 ulp; 0 for NaN and below -87, and e^88 from there on.
float exp_of(float x) {
  if (is_nan(x) || x < -87.0) return 0.0;
  x = min(x, 88.0);
  const float n = roundEven(x * 1.44269504);
  precise float r = fma(n, -0.693359375, x);
  r = fma(n, 2.12194440e-4, r);
  float p = fma(r, 1.9875691500e-4, 1.3981999507e-3);
  p = fma(p, r, 8.3334519073e-3);
  p = fma(p, r, 4.1665795894e-2);
  p = fma(p, r, 1.6666665459e-1);
  p = fma(p, r, 0.5);
  p = fma(p, r * r, r) + 1.0;
  return p * uintBitsToFloat(uint(int(n) + 127) << 23);
}

// e^x for x <= 0: at least about e^-70, and never NaN, because scores have to be ordered.
float exp_negative(float x) { return exp_of(is_nan(x) ? -70.0 : clamp(x, -70.0, 0.0)); }

// ln x of a normal number, to about 2 ulp.
float log_of(float x) {
  uint bits = floatBitsToUint(x) - 0x3f3504f3u;  // sqrt(1 / 2)
  const float n = float(int(bits) >> 23);
  const float f = uintBitsToFloat((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0;
  float p = fma(f, 7.0376836292e-2, -1.1514610310e-1);
  p = fma(p, f, 1.1676998740e-1);
  p = fma(p, f, -1.2420140846e-1);
  p = fma(p, f, 1.4249322787e-1);
  p = fma(p, f, -1.6668057665e-1);
  p = fma(p, f, 2.0000714765e-1);
  p = fma(p, f, -2.4999993993e-1);
  p = fma(p, f, 3.3333331174e-1);
  const float z = f * f;
  float y = p * z * f;
  y = fma(n, -2.12194440e-4, y);
  y = fma(-0.5, z, y);
  return fma(n, 0.693359375, f + y);
}

// 1 / (1 + e^-x), in which e^-|x| does not overflow. NaN stays NaN.
float sigmoid(float x) {
  if (is_nan(x)) return x;
  const float e = exp_of(-abs(x));
  return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

// e^x - 1 and ln(1 + x) near 0.
float expm1_of(float x) {
  if (abs(x) > 0.35) return exp_of(x) - 1.0;
  float p = fma(x, 1.9841270e-4, 1.3888889e-3);
  p = fma(p, x, 8.3333333e-3);
  p = fma(p, x, 4.1666667e-2);
  p = fma(p, x, 1.6666667e-1);
  p = fma(p, x, 0.5);
  return fma(p, x * x, x);
}
float log1p_of(float x) {
  precise const float u = 1.0 + x;
  precise const float rest = x - (u - 1.0);
  return log_of(u) + rest / u;
}

float tanh_of(float x) {
  if (is_nan(x)) return x;
  const float e = expm1_of(-2.0 * abs(x));
  const float y = -e / (2.0 + e);
  return x < 0.0 ? -y : y;
}

// x^n by squaring, n >= 0.
float power(float x, int n) {
  float y = 1.0;
  for (; n > 0; n >>= 1) {
    if ((n & 1) != 0) y *= x;
    x *= x;
  }
  return y;
}

// f16: to f32 exactly, and from f32 to the nearest, ties to even. unpackHalf2x16() may flush
// subnormal numbers, which scales of blocks often are, to zero.
float half_of(uint bits) {
  const uint size = bits & 0x7fffu;
  const uint normal = (size << 13) + (size < 0x7c00u ? 0x38000000u : 0x70000000u);
  const float x = size < 0x400u ? float(size) * uintBitsToFloat(0x33800000u)  // 2^-24
                                : uintBitsToFloat(normal);
  return uintBitsToFloat(floatBitsToUint(x) | (bits & 0x8000u) << 16);
}
vec2 halves_of(uint bits) { return vec2(half_of(bits), half_of(bits >> 16)); }
float half_at(uint64_t address, int i) { return half_of(uint(Shorts(address).at[i])); }
uint half_bits(float x) {
  const uint bits = floatBitsToUint(x), sign = bits >> 16 & 0x8000u;
  const uint size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return sign | 0x7e00u;
  if (size >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
  if (size < 0x38800000u) {                        // subnormal: whole 2^-24
    return sign | uint(roundEven(uintBitsToFloat(size) * 16777216.0));
  }
  const uint rounded = size + 0xfffu + (size >> 13 & 1u);
  return sign | (rounded - 0x38000000u) >> 13;
}
