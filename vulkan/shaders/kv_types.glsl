// The types of cached rows: reading and writing them, with the CPU's bits where the device divides
// floats exactly; Vulkan allows it 2.5 units in the last place.
#define F32 0
#define F16 1
#define Q4_0 2
#define Q8_0 8
#define BF16 30

// Element i of a row.
float element(const int type, uint64_t row, int i) {
  switch (type) {
    case F16:
      return half_at(row, i);
    case BF16:
      return uintBitsToFloat(uint(Shorts(row).at[i]) << 16);
    case Q8_0: {
      const uint64_t block = row + uint64_t(i / 32 * 34);
      return half_at(block, 0) * float(int(Bytes(block).at[2 + i % 32]) << 24 >> 24);
    }
    case Q4_0: {
      const uint64_t block = row + uint64_t(i / 32 * 18);
      const int q = int(Bytes(block).at[2 + i % 16]) >> (i % 32 < 16 ? 0 : 4) & 15;
      return half_at(block, 0) * float(q - 8);
    }
    default:
      return Floats(row).at[i];
  }
}

// Elements [i, i + 4) of a row, i a multiple of 4; zeros from n on. Rows whose length is a multiple
// of 4 are read in words of at least two bytes each.
vec4 four_elements(const int type, uint64_t row, int i, int n) {
  if (i + 4 > n) {
    vec4 x = vec4(0.0);
    for (int j = 0; i + j < n; ++j) x[j] = element(type, row, i + j);
    return x;
  }
  if (type == F32 && n % 4 == 0) return Vec4s(row).at[i / 4];
  if ((type == F16 || type == BF16) && n % 4 == 0) {
    const uint low = Words(row).at[i / 2], high = Words(row).at[i / 2 + 1];
    if (type == F16) return vec4(halves_of(low), halves_of(high));
    return uintBitsToFloat(uvec4(low << 16, low & 0xffff0000u, high << 16, high & 0xffff0000u));
  }
  if (type == Q8_0 || type == Q4_0) {
    const bool bytes = type == Q8_0;
    const uint64_t block = row + uint64_t(i / 32 * (bytes ? 34 : 18));
    const int at = 1 + (bytes ? i % 32 : i % 16) / 2;
    const ivec4 q = ivec4(uvec4(Shorts(block).at[at]) >> uvec4(0, 8, 0, 8));
    const ivec4 p = ivec4(uvec4(Shorts(block).at[at + 1]) >> uvec4(0, 8, 0, 8));
    const ivec4 all = ivec4(q.xy, p.xy);
    if (bytes) return half_at(block, 0) * vec4(all << 24 >> 24);
    return half_at(block, 0) * vec4((all >> i % 32 / 16 * 4 & 15) - 8);
  }
  return vec4(element(type, row, i), element(type, row, i + 1), element(type, row, i + 2),
              element(type, row, i + 3));
}

// The largest number that a row of a type stores, as most_stored() of kv/range.h.
float most_stored(int type) {
  switch (type) {
    case F16:
      return 65504.0;
    case Q8_0:
      return 127.0 * 65504.0;
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
#define WRITE_BLOCK(ROW_BUFFER, type, to, i, n)                                  \
  if (type == Q8_0) {                                                            \
    const uint64_t block = to + uint64_t((i) / 32 * 34);                         \
    float most = 0.0;                                                            \
    for (int j = 0; j < 32; ++j) {                                               \
      const float x = ROW_BUFFER[(i) + j];                                       \
      if (!is_nan(x)) most = max(most, abs(x));                                  \
    }                                                                            \
    precise const float d = most / 127.0;                                        \
    precise const float inverse = d > 0.0 ? 1.0 / d : 0.0;                       \
    Shorts(block).at[0] = uint16_t(half_bits(d));                                \
    for (int j = 0; j < 32; ++j) {                                               \
      precise const float x = ROW_BUFFER[(i) + j] * inverse;                     \
      const int q = is_nan(x) ? -127 : int(clamp(rounded(x), -127.0, 127.0));    \
      Bytes(block).at[2 + j] = uint8_t(q & 255);                                 \
    }                                                                            \
  } else if (type == Q4_0) {                                                     \
    const uint64_t block = to + uint64_t((i) / 32 * 18);                         \
    float farthest = 0.0;                                                        \
    for (int j = 0; j < 32; ++j) {                                               \
      const float x = ROW_BUFFER[(i) + j];                                       \
      if (!is_nan(x) && abs(x) > abs(farthest)) farthest = x;                    \
    }                                                                            \
    precise const float d = farthest / -8.0;                                     \
    precise const float inverse = d != 0.0 ? 1.0 / d : 0.0;                      \
    Shorts(block).at[0] = uint16_t(half_bits(d));                                \
    for (int j = 0; j < 16; ++j) {                                               \
      uint both = 0u;                                                            \
      for (int h = 0; h < 2; ++h) {                                              \
        precise const float scaled = ROW_BUFFER[(i) + j + 16 * h] * inverse;     \
        precise const float x = scaled + 8.5;                                    \
        const int q = is_nan(x) ? 0 : int(clamp(x, 0.0, 15.0));                  \
        both |= uint(q) << 4 * h;                                                \
      }                                                                          \
      Bytes(block).at[2 + j] = uint8_t(both);                                    \
    }                                                                            \
  } else {                                                                       \
    for (int j = (i); j < min((i) + 32, n); ++j) {                               \
      const float x = ROW_BUFFER[j];                                             \
      if (type == F16) {                                                         \
        Shorts(to).at[j] = uint16_t(half_bits(x));                               \
      } else if (type == BF16) {                                                 \
        Shorts(to).at[j] = uint16_t(bf16_bits(x));                               \
      } else {                                                                   \
        Floats(to).at[j] = x;                                                    \
      }                                                                          \
    }                                                                            \
  }
