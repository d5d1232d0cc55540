// Rows of weights in the types of GGUF files, eight elements at a time; see core/blocks.h.

// The numbers of DType.
#define F32 0
#define F16 1
#define Q4_0 2
#define Q4_1 3
#define Q5_0 6
#define Q5_1 7
#define Q8_0 8
#define Q2_K 10
#define Q3_K 11
#define Q4_K 12
#define Q5_K 13
#define Q6_K 14
#define IQ4_NL 20
#define IQ4_XS 23
#define BF16 30
#define MXFP4 39

const int kIq4[16] = int[](-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);
const int kMxfp4[16] = int[](0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);

float bf16_of(uint bits) { return uintBitsToFloat(bits << 16); }
uint byte_at(uint64_t address, int i) { return uint(Bytes(address).at[i]); }
uint short_at(uint64_t address, int i) { return uint(Shorts(address).at[i]); }  // i in shorts
uint word_of_shorts(uint64_t address, int i) {  // i in shorts
  return short_at(address, i) | short_at(address, i + 1) << 16;
}

// The bytes of two words.
struct Eight {
  uint low, high;
};
Eight bytes_at(uint64_t address, int i) {  // i even
  return Eight(word_of_shorts(address, i / 2), word_of_shorts(address, i / 2 + 2));
}
int byte_of(Eight bytes, int i) {
  return int((i < 4 ? bytes.low >> 8 * i : bytes.high >> (8 * i - 32)) & 255u);
}

// The scale and the minimum of group g of 32 elements in Q4_K and Q5_K: six bits each.
vec2 scale_and_min(uint64_t scales, int g) {
  const uint a = byte_at(scales, g % 4), b = byte_at(scales, g % 4 + 4);
  if (g < 4) return vec2(a & 63u, b & 63u);
  const uint c = byte_at(scales, g + 4);
  return vec2(c & 15u | (a >> 6) << 4, c >> 4 | (b >> 6) << 4);
}

// The scale of group g of 16 elements in Q3_K.
int q3_k_scale(uint64_t scales, int g) {
  const uint low = byte_at(scales, g % 8) >> (g < 8 ? 0 : 4) & 15u;
  const uint high = byte_at(scales, 8 + g % 4) >> 2 * (g / 4) & 3u;
  return int(low | high << 4) - 32;
}

// w[j] = d * (q + offset), where q are eight nibbles with an optional fifth bit each.
void unpack(out float w[8], Eight bytes, int shift, uint fifth, float d, float offset) {
  for (int j = 0; j < 8; ++j) {
    const int q = byte_of(bytes, j) >> shift & 15 | int(fifth >> j & 1u) << 4;
    w[j] = fma(d, float(q), offset);
  }
}

// Elements [i, i + 8) of a row of `type`; i is a multiple of 8. What a compiler does not know to be
// constant is not a branch of the shader.
void load_eight(const int type, uint64_t row, int i, out float w[8]) {
  if (type == F32) {
    const vec4 a = Vec4s(row).at[i / 4], b = Vec4s(row).at[i / 4 + 1];
    w = float[](a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w);
    return;
  }
  if (type == F16 || type == BF16) {
    const uvec4 bits = floatBitsToUint(Vec4s(row).at[i / 8]);
    for (int j = 0; j < 4; ++j) {
      const vec2 pair = type == F16 ? halves_of(bits[j])
                                    : vec2(bf16_of(bits[j]), bf16_of(bits[j] >> 16));
      w[2 * j] = pair.x;
      w[2 * j + 1] = pair.y;
    }
    return;
  }
  if (type == Q8_0) {
    const uint64_t block = row + uint64_t(i / 32 * 34);
    const float d = half_at(block, 0);
    const Eight q = bytes_at(block, 2 + i % 32);
    for (int j = 0; j < 8; ++j) w[j] = d * float(byte_of(q, j) << 24 >> 24);
    return;
  }
  const int in_32 = i % 32, shift = in_32 / 16 * 4;
  if (type == Q4_0 || type == IQ4_NL) {
    const uint64_t block = row + uint64_t(i / 32 * 18);
    const float d = half_at(block, 0);
    const Eight q = bytes_at(block, 2 + i % 16);
    if (type == Q4_0) {
      unpack(w, q, shift, 0u, d, -8.0 * d);
    } else {
      for (int j = 0; j < 8; ++j) w[j] = d * float(kIq4[byte_of(q, j) >> shift & 15]);
    }
    return;
  }
  if (type == Q4_1) {
    const uint64_t block = row + uint64_t(i / 32 * 20);
    unpack(w, bytes_at(block, 4 + i % 16), shift, 0u, half_at(block, 0), half_at(block, 1));
    return;
  }
  if (type == Q5_0) {
    const uint64_t block = row + uint64_t(i / 32 * 22);
    const float d = half_at(block, 0);
    unpack(w, bytes_at(block, 6 + i % 16), shift, byte_at(block, 2 + in_32 / 8), d, -16.0 * d);
    return;
  }
  if (type == Q5_1) {
    const uint64_t block = row + uint64_t(i / 32 * 24);
    unpack(w, bytes_at(block, 8 + i % 16), shift, byte_at(block, 4 + in_32 / 8), half_at(block, 0),
           half_at(block, 1));
    return;
  }
  if (type == MXFP4) {
    const uint64_t block = row + uint64_t(i / 32 * 17);  // not aligned
    const uint e = byte_at(block, 0);
    const float d = e < 2u ? uintBitsToFloat(0x00200000u << e) : uintBitsToFloat((e - 1u) << 23);
    for (int j = 0; j < 8; ++j) {
      w[j] = d * float(kMxfp4[byte_at(block, 1 + i % 16 + j) >> shift & 15u]);
    }
    return;
  }

  const int e = i % 256, group = e / 32;  // blocks of 256 elements
  if (type == Q4_K || type == Q5_K) {
    const uint64_t block = row + uint64_t(i / 256 * (type == Q4_K ? 144 : 176));
    const vec2 scales = scale_and_min(block + 4, group);
    const uint64_t qs = block + (type == Q4_K ? 16 : 48);
    const Eight q = bytes_at(qs, e / 64 * 32 + in_32);
    uint fifth = 0u;
    if (type == Q5_K) {
      const Eight high = bytes_at(block + 16, in_32);
      for (int j = 0; j < 8; ++j) fifth |= uint(byte_of(high, j) >> group & 1) << j;
    }
    unpack(w, q, group % 2 * 4, fifth, half_at(block, 0) * scales.x, -half_at(block, 1) * scales.y);
    return;
  }
  if (type == Q6_K) {
    const uint64_t block = row + uint64_t(i / 256 * 210);
    const int scale = int(byte_at(block, 192 + e / 16)) << 24 >> 24;
    const float d = half_at(block, 104) * float(scale);
    const int in_128 = e % 128;
    const Eight low = bytes_at(block, e / 128 * 64 + in_128 % 64);
    const Eight high = bytes_at(block, 128 + e / 128 * 32 + in_32);
    for (int j = 0; j < 8; ++j) {
      const int q = byte_of(low, j) >> in_128 / 64 * 4 & 15 |
                    (byte_of(high, j) >> in_128 / 32 * 2 & 3) << 4;
      w[j] = d * float(q - 32);
    }
    return;
  }
  if (type == Q2_K) {
    const uint64_t block = row + uint64_t(i / 256 * 84);
    const uint scale = byte_at(block, e / 16);
    const float d = half_at(block, 40) * float(scale & 15u);
    const float least = half_at(block, 41) * float(scale >> 4);
    const Eight q = bytes_at(block, 16 + e / 128 * 32 + in_32);
    for (int j = 0; j < 8; ++j) {
      w[j] = fma(d, float(byte_of(q, j) >> e % 128 / 32 * 2 & 3), -least);
    }
    return;
  }
  if (type == Q3_K) {
    const uint64_t block = row + uint64_t(i / 256 * 110);
    const float d = half_at(block, 54) * float(q3_k_scale(block + 96, e / 16));
    const Eight q = bytes_at(block, 32 + e / 128 * 32 + in_32);
    const Eight mask = bytes_at(block, in_32);
    for (int j = 0; j < 8; ++j) {
      const int third = byte_of(mask, j) >> group & 1;
      w[j] = d * float((byte_of(q, j) >> e % 128 / 32 * 2 & 3 | third << 2) - 4);
    }
    return;
  }
  // IQ4_XS
  const uint64_t block = row + uint64_t(i / 256 * 136);
  const uint low = byte_at(block, 4 + group / 2) >> group % 2 * 4 & 15u;
  const uint high = short_at(block, 1) >> 2 * group & 3u;
  const float d = half_at(block, 0) * float(int(low | high << 4) - 32);
  const Eight q = bytes_at(block, 8 + group * 16 + i % 16);
  for (int j = 0; j < 8; ++j) w[j] = d * float(kIq4[byte_of(q, j) >> shift & 15]);
}

// One element of a row whose length is not a multiple of 8, which only floats have.
float load_one(const int type, uint64_t row, int i) {
  if (type == F32) return Floats(row).at[i];
  return type == F16 ? half_at(row, i) : bf16_of(short_at(row, i));
}

// The same as load_eight() for any length and alignment; zeros past the end.
void load_eight_of(const int type, uint64_t row, int i, int n, out float w[8]) {
  if (n % 8 == 0 && (type > F16 && type != BF16 || (row & 15) == 0)) {
    load_eight(type, row, i, w);
    return;
  }
  for (int j = 0; j < 8; ++j) w[j] = i + j < n ? load_one(type, row, i + j) : 0.0;
}
