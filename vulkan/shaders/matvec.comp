// Products of few rows: a workgroup computes OUTPUTS outputs of up to ROWS rows, or of one row of an
// expert, so that weights are read once.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#include "common.glsl"
#include "product.glsl"
#include "weights.glsl"

#define THREADS 64
#define OUTPUTS 4
layout(local_size_x = THREADS) in;
layout(constant_id = 3) const int ROWS = 1;

shared float sums[THREADS];  // of each subgroup, in order

void multiply(int first_output) {
  const int t = int(gl_LocalInvocationIndex);
  const int first_row = int(gl_WorkGroupID.y) * ROWS;
  const int64_t base = EXPERTS ? first + expert_of(first_row) * stride : first;
  float all[OUTPUTS][ROWS];
  for (int o = 0; o < OUTPUTS; ++o) {
    for (int r = 0; r < ROWS; ++r) all[o][r] = 0.0;
  }
  for (int i = 8 * t; i < n_in; i += 8 * THREADS) {
    float v[ROWS][8];
    for (int r = 0; r < ROWS; ++r) {
      const int row = min(first_row + r, n_rows - 1);
      load_eight_of(F32, x + uint64_t(int64_t(row) * n_in * 4), i, n_in, v[r]);
    }
    for (int o = 0; o < OUTPUTS; ++o) {
      const int64_t weight_row = base + min(first_output + o, n_out - 1);
      float w[8];
      load_eight_of(TYPE, weight + uint64_t(weight_row * row_bytes), i, n_in, w);
      for (int r = 0; r < ROWS; ++r) {
        for (int j = 0; j < 8; ++j) all[o][r] = fma(w[j], v[r][j], all[o][r]);
      }
    }
  }
  for (int o = 0; o < OUTPUTS; ++o) {
    for (int r = 0; r < ROWS; ++r) {
      const float sum = subgroupAdd(all[o][r]);
      if (subgroupElect()) sums[gl_SubgroupID] = sum;
      barrier();
      if (t == 0 && first_output + o < n_out && first_row + r < n_rows) {
        float total = 0.0;
        for (int s = 0; s < int(gl_NumSubgroups); ++s) total += sums[s];
        put(first_row + r, first_output + o, base + first_output + o, total);
      }
      barrier();
    }
  }
}

void main() {
  for (int o = int(gl_WorkGroupID.x) * OUTPUTS; o < n_out;
       o += int(gl_NumWorkGroups.x) * OUTPUTS) {
    multiply(o);
  }
}
