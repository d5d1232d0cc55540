// The types of cached rows: reading and writing them, with the CPU's bits where the device divides
// floats exactly; Vulkan allows it 2.5 units in the last place.
const uint64_t codebook = 0;
#include "weights.glsl"

// Element i of a row of n.
float element(const int type, uint64_t row, int i, int n) {
  if (type == F32 || type == F16 || type == BF16) return load_one(type, row, i);
  float x[8];
  load_eight_of(type, row, i / 8 * 8, n, x);
  return x[i % 8];
}

// The largest number that a row of a type stores, as most_stored() of kv/range.h.
float most_stored(int type) {
  switch (type) {
    case F16:
      return 65504.0;
    case Q8_0:
      return 127.0 * 65504.0;
    case Q5_0:
      return 16.0 * 65504.0;
    case Q4_0:
      return 8.0 * 65504.0;
    default:
      return largest_float();
  }
}

// x moved into the range of numbers; infinity and NaN stay as they are.
float clamped_to(float most, float x) {
  const uint size = floatBitsToUint(x) & 0x7fffffffu;
  if (size >= 0x7f800000u || uintBitsToFloat(size) <= most) return x;
  return x < 0.0 ? -most : most;
}

// To the nearest integer, halves away from zero, as roundf().
float rounded(float x) {
  const float size = abs(x), whole = floor(size);
  const float up = size - whole >= 0.5 ? whole + 1.0 : whole;
  return x < 0.0 ? -up : up;
}

uint bf16_bits(float x) {
  const uint bits = floatBitsToUint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;
  return bits + 0x7fffu + (bits >> 16 & 1u) >> 16;
}

// Writes elements [i, i + 32) of a row of n elements from ROW_BUFFER, a shared array; by one thread.
#define WRITE_BLOCK(ROW_BUFFER, type, to, i, n)                                       \
  if (type == Q8_0 || type == Q5_0 || type == Q4_0) {                                 \
    const float zero = type == Q5_0 ? 16.0 : 8.0;                                     \
    const int bytes = type == Q8_0 ? 34 : type == Q5_0 ? 22 : 18;                     \
    const uint64_t block = to + uint64_t((i) / 32 * bytes);                           \
    float farthest = 0.0;                                                             \
    for (int j = 0; j < 32; ++j) {                                                    \
      const float x = ROW_BUFFER[(i) + j];                                            \
      if (!is_nan(x) && abs(x) > abs(farthest)) farthest = x;                         \
    }                                                                                 \
    precise const float d = type == Q8_0 ? abs(farthest) / 127.0 : farthest / -zero;  \
    precise const float inverse = d != 0.0 ? 1.0 / d : 0.0;                           \
    Shorts(block).at[0] = uint16_t(half_bits(d));                                     \
    uint fifths = 0u, low[16];                                                        \
    for (int j = 0; j < 32; ++j) {                                                    \
      precise const float x = ROW_BUFFER[(i) + j] * inverse;                          \
      if (type == Q8_0) {                                                             \
        const int q = is_nan(x) ? -127 : int(clamp(rounded(x), -127.0, 127.0));       \
        Bytes(block).at[2 + j] = uint8_t(q & 255);                                    \
      } else {                                                                        \
        precise const float level = x + (zero + 0.5);                                 \
        const uint q = is_nan(x) ? 0u : uint(clamp(level, 0.0, 2.0 * zero - 1.0));    \
        low[j % 16] = j < 16 ? q & 15u : low[j % 16] | (q & 15u) << 4;                \
        fifths |= (q >> 4) << j;                                                      \
      }                                                                               \
    }                                                                                 \
    for (int j = 0; type != Q8_0 && j < 16; ++j) {                                    \
      Bytes(block).at[bytes - 16 + j] = uint8_t(low[j]);                              \
      if (type == Q5_0 && j < 4) Bytes(block).at[2 + j] = uint8_t(fifths >> 8 * j & 255u);\
    }                                                                                 \
  } else {                                                                            \
    for (int j = (i); j < min((i) + 32, n); ++j) {                                    \
      const float x = ROW_BUFFER[j];                                                  \
      if (type == F16) {                                                              \
        Shorts(to).at[j] = uint16_t(half_bits(x));                                    \
      } else if (type == BF16) {                                                      \
        Shorts(to).at[j] = uint16_t(bf16_bits(x));                                    \
      } else {                                                                        \
        Floats(to).at[j] = x;                                                         \
      }                                                                               \
    }                                                                                 \
  }
