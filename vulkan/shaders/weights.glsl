// Rows of weights in the types of GGUF files, eight elements at a time; see core/blocks.h. The push
// constant `codebook` is the address of the type's table of core/iq_grids.h.

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
#define IQ2_XXS 16
#define IQ2_XS 17
#define IQ3_XXS 18
#define IQ1_S 19
#define IQ4_NL 20
#define IQ3_S 21
#define IQ2_S 22
#define IQ4_XS 23
#define IQ1_M 29
#define BF16 30
#define TQ1_0 34
#define TQ2_0 35
#define MXFP4 39
#define NVFP4 40
#define Q1_0 41
#define Q2_0 42

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

// Element j of eight whose sign bits are `signs`.
float with_sign(Eight elements, uint signs, int j) {
  const float x = float(byte_of(elements, j));
  return (signs >> j & 1u) != 0u ? -x : x;
}
// The eighth sign makes the number of negative elements even.
uint even_signs(uint seven) {
  seven &= 127u;
  return seven | (uint(bitCount(seven)) & 1u) << 7;
}

// Elements [e, e + 8) of a block of 256 whose elements are entries of a codebook.
void load_entries(const int type, uint64_t block, int e, out float w[8]) {
  const int group = e / 32, l = e / 8 % 4, eighth = e / 8;
  int a = 0, b = 0;  // of IQ3's entries, which have four elements
  uint signs = 0u, scale = 0u;
  float d = type == IQ1_M ? 0.0 : half_at(block, 0), more = 0.0;
  switch (type) {
    case IQ2_XXS: {
      const uint word = word_of_shorts(block, 3 + 4 * group);
      a = int(byte_at(block, 2 + 8 * group + l));
      signs = even_signs(word >> 7 * l);
      scale = word >> 28;
      d *= 0.125;
      break;
    }
    case IQ2_XS: {
      const uint word = short_at(block, 1 + eighth);
      a = int(word & 511u);
      signs = even_signs(word >> 9);
      scale = byte_at(block, 66 + group) >> l / 2 * 4 & 15u;
      d *= 0.125;
      break;
    }
    case IQ2_S:
      a = int(byte_at(block, 2 + eighth) | byte_at(block, 66 + group) << 8 - 2 * l & 0x300u);
      signs = byte_at(block, 34 + eighth);
      scale = byte_at(block, 74 + group) >> l / 2 * 4 & 15u;
      d *= 0.125;
      break;
    case IQ3_XXS: {
      const uint word = word_of_shorts(block, 33 + 2 * group);
      a = int(byte_at(block, 2 + 2 * eighth));
      b = int(byte_at(block, 3 + 2 * eighth));
      signs = even_signs(word >> 7 * l);
      scale = word >> 28;
      d *= 0.25;
      break;
    }
    case IQ3_S: {
      const uint high = byte_at(block, 66 + group);
      a = int(byte_at(block, 2 + 2 * eighth) | high << 8 - 2 * l & 256u);
      b = int(byte_at(block, 3 + 2 * eighth) | high << 7 - 2 * l & 256u);
      signs = byte_at(block, 74 + eighth);
      scale = byte_at(block, 106 + group / 2) >> group % 2 * 4 & 15u;
      break;
    }
    case IQ1_S: {
      const uint high = short_at(block, 17 + group);
      a = int(byte_at(block, 2 + eighth) | (high >> 3 * l & 7u) << 8);
      scale = high >> 12 & 7u;
      more = (high & 0x8000u) != 0u ? -10.0 : -8.0;
      d *= 0.125;
      break;
    }
    default: {  // IQ1_M, whose d is the high nibbles of four words
      const uint high = byte_at(block, 32 + eighth / 2) >> eighth % 2 * 4;
      uint bits = 0u;
      for (int i = 0; i < 4; ++i) bits |= short_at(block, 24 + i) >> 12 << 4 * i;
      a = int(byte_at(block, eighth) | (high & 7u) << 8);
      scale = short_at(block, 24 + group / 2) >> 6 * (group % 2) + 3 * (l / 2) & 7u;
      more = (high & 8u) != 0u ? -10.0 : -8.0;
      d = half_of(bits) * 0.125;
    }
  }
  const bool fours = type == IQ3_XXS || type == IQ3_S;
  Words table = Words(codebook);
  const Eight entry = fours ? Eight(table.at[a], table.at[b])
                            : Eight(table.at[2 * a], table.at[2 * a + 1]);
  d *= float(2u * scale + 1u);
  for (int j = 0; j < 8; ++j) w[j] = d * (with_sign(entry, signs, j) + more);
}

// The digit of element e of TQ1_0: five to a byte, in base 3, the first ones the highest.
int ternary_digit(uint64_t block, int e) {
  const int part = e < 160 ? 0 : e < 240 ? 160 : 240, n = e < 160 ? 32 : e < 240 ? 16 : 4;
  uint q = byte_at(block, part / 5 + (e - part) % n);
  for (int i = (e - part) / n; i > 0; --i) q = 3u * q & 255u;
  return int(3u * q >> 8);
}

// The scale of 16 elements of NVFP4: four bits of exponent, three of fraction, halved.
float nvfp4_scale(uint bits) {
  const uint e = bits >> 3 & 15u, m = bits & 7u;
  if (bits == 127u) return 0.0;
  return float(e == 0u ? m << 1 : (m | 8u) << e) * 0.00048828125;  // 2^-11
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

  if (type == NVFP4) {
    const uint64_t block = row + uint64_t(i / 64 * 36);
    const float d = nvfp4_scale(byte_at(block, i % 64 / 16));
    const Eight q = bytes_at(block, 4 + i % 64 / 16 * 8);
    for (int j = 0; j < 8; ++j) w[j] = d * float(kMxfp4[byte_of(q, j) >> i % 16 / 2 & 15]);
    return;
  }
  if (type == Q1_0) {
    const uint64_t block = row + uint64_t(i / 128 * 18);
    const float d = half_at(block, 0);
    const uint bits = byte_at(block, 2 + i % 128 / 8);
    for (int j = 0; j < 8; ++j) w[j] = (bits >> j & 1u) != 0u ? d : -d;
    return;
  }
  if (type == Q2_0) {
    const uint64_t block = row + uint64_t(i / 64 * 18);
    const float d = half_at(block, 0);
    const uint bits = short_at(block, 1 + i % 64 / 8);
    for (int j = 0; j < 8; ++j) w[j] = d * (float(bits >> 2 * j & 3u) - 1.0);
    return;
  }

  const int e = i % 256, group = e / 32;  // blocks of 256 elements
  if (type == TQ1_0 || type == TQ2_0) {
    const uint64_t block = row + uint64_t(i / 256 * (type == TQ1_0 ? 54 : 66));
    const float d = half_at(block, type == TQ1_0 ? 26 : 32);
    for (int j = 0; j < 8; ++j) {
      const int q = type == TQ1_0 ? ternary_digit(block, e + j)
                                  : int(byte_at(block, e / 128 * 32 + in_32 + j) >>
                                            e % 128 / 32 * 2 & 3u);
      w[j] = d * float(q - 1);
    }
    return;
  }
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
  if (type == IQ4_XS) {
    const uint64_t block = row + uint64_t(i / 256 * 136);
    const uint low = byte_at(block, 4 + group / 2) >> group % 2 * 4 & 15u;
    const uint high = short_at(block, 1) >> 2 * group & 3u;
    const float d = half_at(block, 0) * float(int(low | high << 4) - 32);
    const Eight q = bytes_at(block, 8 + group * 16 + i % 16);
    for (int j = 0; j < 8; ++j) w[j] = d * float(kIq4[byte_of(q, j) >> shift & 15]);
    return;
  }
  const int bytes = type == IQ2_XXS   ? 66
                    : type == IQ2_XS  ? 74
                    : type == IQ2_S   ? 82
                    : type == IQ3_XXS ? 98
                    : type == IQ3_S   ? 110
                    : type == IQ1_S   ? 50
                                      : 56;
  load_entries(type, row + uint64_t(i / 256 * bytes), e, w);
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
