// Rotary position embedding (RoFormer, arXiv 2104.09864).

// The first 192 bits of 2 / pi.
const uint kTwoOverPi[6] = uint[](0x28be60dbu, 0x9391054au, 0x7f09d5f4u, 0x7d4d3770u, 0x36d8a566u,
                                  0x4f10e410u);

// x - q pi / 2, in [-pi / 4, pi / 4], for any x: Payne and Hanek's reduction (SIGNUM 18, 1983).
// GLSL's own sine is inaccurate outside [-pi, pi].
float reduce_angle(float x, out int q) {
  const float size = abs(x);
  q = 0;
  if (size <= 0.785398163) return x;
  const uint bits = floatBitsToUint(size);
  const uint e = (bits >> 23) - 126u;              // size = 0.m * 2^e
  const uint m = (bits & 0x7fffffu | 0x800000u) << 8;
  const uint word = e >> 5, shift = e & 31u;
  uint high = word > 0u ? kTwoOverPi[word - 1u] : 0u;
  uint middle = kTwoOverPi[word], low = kTwoOverPi[word + 1u];
  if (shift > 0u) {
    high = high << shift | middle >> (32u - shift);
    middle = middle << shift | low >> (32u - shift);
    low = low << shift | kTwoOverPi[word + 2u] >> (32u - shift);
  }
  uint64_t product = uint64_t(m) * low;
  product = uint64_t(m) * middle + (product >> 32);
  product = (uint64_t(m * high) << 32) + product;  // of 2^62 are quarters of a turn
  q = int(product >> 62);
  int64_t rest = int64_t(product & 0x3fffffffffffffffUL);
  if ((rest >> 61) != 0) {
    rest -= 0x4000000000000000L;
    ++q;
  }
  const float r = float(rest) * (1.57079632679 / 4611686018427387904.0);
  if (x < 0.0) q = -q;
  return x < 0.0 ? -r : r;
}

// Cosine and sine of x, to about 1 ulp, for |x| < 2^64.
vec2 cosine_sine(float x) {
  int q;
  const float r = reduce_angle(x, q), s = r * r;
  float sine = fma(2.86567956e-6, s, -1.98559923e-4);
  sine = fma(sine, s, 8.33338592e-3);
  sine = fma(sine, s, -1.66666672e-1);
  sine = fma(sine, s * r, r);
  float cosine = fma(2.44677067e-5, s, -1.38877297e-3);
  cosine = fma(cosine, s, 4.16666567e-2);
  cosine = fma(cosine, s, -0.5);
  cosine = fma(cosine, s, 1.0);
  switch (q & 3) {
    case 0:
      return vec2(cosine, sine);
    case 1:
      return vec2(-sine, cosine);
    case 2:
      return vec2(-cosine, -sine);
    default:
      return vec2(sine, -cosine);
  }
}

// The cosine and sine of pair i at a position, times the magnitude; the angle is computed in f32,
// as in transformers and llama.cpp.
vec2 rope_angle(uint64_t frequencies, float magnitude, int position, int i) {
  precise const float angle = float(position) * Floats(frequencies).at[i];
  return cosine_sine(angle) * magnitude;
}

// The pair (a, b) rotated.
vec2 turned(vec2 angle, float a, float b) {
  return vec2(a * angle.x - b * angle.y, a * angle.y + b * angle.x);
}
