// Products of many rows: a workgroup computes a tile of outputs from tiles in shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "product.glsl"
#include "weights.glsl"

#define THREADS 256
#define OUTPUTS 64  // of a tile
#define ROWS 32
#define DEPTH 32
layout(local_size_x = THREADS) in;

shared float w_tile[DEPTH][OUTPUTS + 1];
shared float x_tile[DEPTH][ROWS + 1];

// The rows [begin, end) of tile number `tile`, which belong to one expert.
void find_rows(int tile, out int expert, out int begin, out int end) {
  expert = 0;
  begin = tile * ROWS;
  end = min(begin + ROWS, n_rows);
  if (!EXPERTS) return;
  for (; expert < n_experts; ++expert) {
    const int first_row = first_row_of(expert), last = first_row_of(expert + 1);
    const int n_tiles = (last - first_row + ROWS - 1) / ROWS;
    begin = first_row + tile * ROWS;
    end = min(begin + ROWS, last);
    if (tile < n_tiles) return;
    tile -= n_tiles;
  }
  end = begin = 0;  // past the last tile
}

void main() {
  const int t = int(gl_LocalInvocationIndex);
  const int first_output = int(gl_WorkGroupID.x) * OUTPUTS;
  int expert, begin, end;
  find_rows(int(gl_WorkGroupID.y), expert, begin, end);
  if (begin >= end) return;
  const int64_t base = first + expert * stride;

  // A thread loads eight weights and four numbers of x, and computes 4 outputs of 2 rows.
  const int load_w = t / 4, load_x = t / 8;
  const uint64_t w_row =
      weight + uint64_t((base + min(first_output + load_w, n_out - 1)) * row_bytes);
  Floats x_row = floats(x, int64_t(min(begin + load_x, end - 1)) * n_in);
  const int own_output = t % 16 * 4, own_row = t / 16 * 2;
  float sums[2][4];
  for (int r = 0; r < 2; ++r) {
    for (int o = 0; o < 4; ++o) sums[r][o] = 0.0;
  }
  for (int depth = 0; depth < n_in; depth += DEPTH) {
    const int w_at = depth + t % 4 * 8, x_at = depth + t % 8 * 4;
    float w[8] = float[](0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0);
    if (w_at < n_in) load_eight_of(TYPE, w_row, w_at, n_in, w);
    barrier();
    for (int j = 0; j < 8; ++j) w_tile[t % 4 * 8 + j][load_w] = w[j];
    for (int j = 0; j < 4; ++j) {
      x_tile[t % 8 * 4 + j][load_x] = x_at + j < n_in ? x_row.at[x_at + j] : 0.0;
    }
    barrier();
    for (int d = 0; d < DEPTH; ++d) {
      for (int r = 0; r < 2; ++r) {
        const float v = x_tile[d][own_row + r];
        for (int o = 0; o < 4; ++o) sums[r][o] = fma(w_tile[d][own_output + o], v, sums[r][o]);
      }
    }
  }
  for (int r = 0; r < 2; ++r) {
    if (begin + own_row + r >= end) continue;
    for (int o = 0; o < 4; ++o) {
      const int output_index = first_output + own_output + o;
      if (output_index < n_out) {
        put(begin + own_row + r, output_index, base + output_index, sums[r][o]);
      }
    }
  }
}
