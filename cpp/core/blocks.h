// The element types as stored in a GGUF file. Blocks are only 2-byte aligned. Formulas give an
// element's value in terms of q, the integer formed by its bits.
#pragma once

#include <cstdint>

namespace h2o {

struct F16 {
  uint16_t bits;
};

struct BF16 {
  uint16_t bits;
};

struct E8M0 {  // 2^(bits - 128)
  uint8_t bits;
};

// ---- Blocks of 32 elements. The low nibbles of qs[16] are elements 0 to 15, the high nibbles 16
// to 31. Bit i of qh is the fifth bit of element i. ----

struct BlockQ4_0 {  // d * (q - 8)
  F16 d;
  uint8_t qs[16];
};

struct BlockQ4_1 {  // d * q + m
  F16 d;
  F16 m;
  uint8_t qs[16];
};

struct BlockQ5_0 {  // d * (q - 16)
  F16 d;
  uint8_t qh[4];
  uint8_t qs[16];
};

struct BlockQ5_1 {  // d * q + m
  F16 d;
  F16 m;
  uint8_t qh[4];
  uint8_t qs[16];
};

struct BlockQ8_0 {  // d * q
  F16 d;
  int8_t qs[32];
};

struct BlockIQ4_NL {  // d * kIq4Values[q]
  F16 d;
  uint8_t qs[16];
};

constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};

struct BlockMXFP4 {  // d * kMxfp4Values[q]
  E8M0 d;            // half of the MX standard's value, because the values are doubled
  uint8_t qs[16];
};

constexpr int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// ---- The archive's types. The low two bits of element i of 32 are bits 2i and 2i + 1 of qs. ----

struct E5M3 {  // (8 + bits % 8) * 2^(bits / 8 - 22)
  uint8_t bits;
};

struct BlockQ2 {  // d * (q - zero / 64), of 64 elements: a half is 32
  E5M3 d;
  uint8_t zero;
  uint8_t qs[2][8];
};

struct BlockQ3 {  // q; a KeyGrid makes keys of them
  uint8_t qs[8];
  uint8_t qh[4];  // bit i is the third bit of element i
};

// ---- Blocks of 256 elements: groups of 16 or 32 with a scale each, scaled by the block's d. ----

struct BlockQ2_K {     // d * scale * q - dmin * min
  uint8_t scales[16];  // of 16 elements: scale | min << 4
  uint8_t qs[64];      // element 128 n + 32 k + l: bits 2 k of byte 32 n + l
  F16 d;
  F16 dmin;
};

struct BlockQ3_K {     // d * (scale - 32) * (q - 4)
  uint8_t hmask[32];   // element 32 g + l: its third bit is bit g of byte l
  uint8_t qs[64];      // as BlockQ2_K
  uint8_t scales[12];  // of 16 elements, 6 bits each
  F16 d;
};

struct BlockQ4_K {  // d * scale * q - dmin * min
  F16 d;
  F16 dmin;
  uint8_t scales[12];  // of 32 elements: 8 scales and 8 mins of 6 bits
  uint8_t qs[128];     // element 64 n + l: low nibble of byte 32 n + l; + 32: the high nibble
};

struct BlockQ5_K {  // d * scale * q - dmin * min
  F16 d;
  F16 dmin;
  uint8_t scales[12];  // as BlockQ4_K
  uint8_t qh[32];      // element 32 g + l: its fifth bit is bit g of byte l
  uint8_t qs[128];     // as BlockQ4_K
};

struct BlockQ6_K {  // d * scale * (q - 32)
  uint8_t ql[128];  // element 128 n + l, l < 64: low nibble of byte 64 n + l; + 64: the high nibble
  uint8_t qh[64];   // element 128 n + 32 k + l: bits 2 k of byte 32 n + l are its high two
  int8_t scales[16];  // of 16 elements
  F16 d;
};

struct BlockIQ4_XS {  // d * (scale - 32) * kIq4Values[q]
  F16 d;
  uint16_t scales_h;    // of 32 elements, group g: bits 2 g are the high two
  uint8_t scales_l[4];  // the low four: nibble g % 2 of byte g / 2
  uint8_t qs[128];      // 16 bytes for each 32 elements, as in BlockIQ4_NL
};

// ---- Indices of codebooks (core/iq_grids.h); an entry has 8 elements, in IQ3 4. A set sign bit
// means negative; where 8 elements have only 7 sign bits, the number of negative elements is even.
// ----

struct BlockIQ2_XXS {  // d * (2 scale + 1) / 8 * element
  F16 d;
  uint8_t qs[64];  // of 32 elements: 4 indices, then a word of 4 times 7 signs and the scale
};

struct BlockIQ2_XS {  // d * (2 scale + 1) / 8 * element
  F16 d;
  uint8_t qs[64];     // words of 9 bits of index and 7 signs
  uint8_t scales[8];  // of 16 elements, 4 bits each
};

struct BlockIQ2_S {  // d * (2 scale + 1) / 8 * element
  F16 d;
  uint8_t qs[32];     // the low bits of the indices
  uint8_t signs[32];  // of 8 elements
  uint8_t qh[8];      // the high two bits of 4 indices
  uint8_t scales[8];  // of 16 elements, 4 bits each
};

struct BlockIQ3_XXS {  // d * (2 scale + 1) / 4 * element
  F16 d;
  uint8_t qs[64];
  uint8_t scales[32];  // of 32 elements: a word of 4 times 7 signs and the scale
};

struct BlockIQ3_S {  // d * (2 scale + 1) * element
  F16 d;
  uint8_t qs[64];     // the low bits of the indices
  uint8_t qh[8];      // the ninth bit of 8 indices
  uint8_t signs[32];  // of 8 elements
  uint8_t scales[4];  // of 32 elements, 4 bits each
};

struct BlockIQ1_S {  // d * (2 scale + 1) * (element + delta), delta = 1 / 8 of either sign
  F16 d;
  uint8_t qs[32];  // the low bits of the indices
  uint8_t qh[16];  // a word for 32 elements: 4 times 3 high bits, 3 of scale, the sign of delta
};

struct BlockIQ1_M {   // the same
  uint8_t qs[32];     // the low bits of the indices
  uint8_t qh[16];     // a nibble for 8 elements: 3 high bits, the sign of delta
  uint8_t scales[8];  // words: 4 times 3 bits of scale, of 16 elements; 4 bits of d
};

// The CPU's interleaved form of any of these (cpu/matmul/interleave.h), with four bits per element:
// d * (2 scale + 1) * step * element. Steps and elements are in cpu/matmul/codebooks-inl.h.
template <int64_t kGroup>
struct BlockNibbles {
  uint8_t scales[256 / kGroup / 2];  // of kGroup elements, 4 bits each
  uint8_t qs[128];                   // 16 bytes for each 32 elements, as in BlockIQ4_NL
  F16 d;
};

// ---- Others ----

struct BlockTQ1_0 {  // d * (q - 1)
  uint8_t qs[48];    // base-3 digits of q, see cpu/matmul/codebooks-inl.h
  uint8_t qh[4];
  F16 d;
};

struct BlockTQ2_0 {  // d * (q - 1)
  uint8_t qs[64];    // as BlockQ2_K
  F16 d;
};

struct BlockNVFP4 {  // of 64 elements: d * kMxfp4Values[q]
  uint8_t d[4];      // of 16 elements, in E4M3 without a sign, halved for the doubled values
  uint8_t qs[32];    // 8 bytes for 16 elements: the low nibbles, then the high ones
};

struct BlockQ1_0 {  // of 128 elements: d or, where a bit is 0, -d
  F16 d;
  uint8_t qs[16];
};

struct BlockQ2_0 {  // of 64 elements: d * (q - 1)
  F16 d;
  uint8_t qs[16];  // four consecutive elements in a byte
};

// The CPU's interleaved form of NVFP4, with scales in f16.
struct BlockNvfp4Halves {
  F16 d[4];
  uint8_t qs[32];  // 16 bytes for each 32 elements, as in BlockIQ4_NL
};

static_assert(sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20 && sizeof(BlockQ5_0) == 22 &&
              sizeof(BlockQ5_1) == 24 && sizeof(BlockQ8_0) == 34 && sizeof(BlockIQ4_NL) == 18 &&
              sizeof(BlockMXFP4) == 17);
static_assert(sizeof(BlockQ2_K) == 84 && sizeof(BlockQ3_K) == 110 && sizeof(BlockQ4_K) == 144 &&
              sizeof(BlockQ5_K) == 176 && sizeof(BlockQ6_K) == 210 && sizeof(BlockIQ4_XS) == 136);

static_assert(sizeof(BlockIQ2_XXS) == 66 && sizeof(BlockIQ2_XS) == 74 && sizeof(BlockIQ2_S) == 82 &&
              sizeof(BlockIQ3_XXS) == 98 && sizeof(BlockIQ3_S) == 110 && sizeof(BlockIQ1_S) == 50 &&
              sizeof(BlockIQ1_M) == 56 && sizeof(BlockTQ1_0) == 54 && sizeof(BlockTQ2_0) == 66 &&
              sizeof(BlockNVFP4) == 36 && sizeof(BlockQ1_0) == 18 && sizeof(BlockQ2_0) == 18);

}  // namespace h2o
