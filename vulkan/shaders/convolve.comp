// A causal convolution of one channel along the rows of a segment: of the inputs of a DeltaNet or a
// StateSpace, in place, or of a ShortConv.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

#define MOST_TAPS 8  // kMaxTaps
layout(local_size_x = 64) in;
layout(constant_id = 0) const bool SHORT_CONV = false;

layout(push_constant, scalar) uniform Push {
  uint64_t to, from, states, conv, bias, segments;
  int64_t state_floats, first;  // of a sequence, and before the rows that are kept
  int width, n_taps;
};

// Input i of this channel: b x of a ShortConv.
float load(int64_t row, int channel) {
  if (!SHORT_CONV) return floats(from, row * width).at[channel];
  Floats bcx = floats(from, row * 3 * width);
  return bcx.at[channel] * bcx.at[2 * width + channel];
}

void main() {
  const int channel = int(gl_GlobalInvocationID.y * 64 + gl_LocalInvocationID.x);
  if (channel >= width) return;
  Ints segment = Ints(segments + gl_WorkGroupID.x * kSegmentBytes);
  const int sequence = segment.at[0], first_row = segment.at[2], n_rows = segment.at[3];
  Floats before = floats(states, sequence * state_floats + first + channel);
  float taps[MOST_TAPS], rows[MOST_TAPS];
  for (int i = 0; i < n_taps; ++i) {
    taps[i] = Floats(conv).at[i * width + channel];
    rows[i] = i + 1 < n_taps ? before.at[i * width] : 0.0;
  }
  for (int64_t row = first_row; row < first_row + n_rows; ++row) {
    rows[n_taps - 1] = load(row, channel);
    float sum = bias != 0 ? Floats(bias).at[channel] : 0.0;
    for (int i = 0; i < n_taps; ++i) sum = fma(rows[i], taps[i], sum);
    const float c = SHORT_CONV ? floats(from, (row * 3 + 1) * width).at[channel] : sigmoid(sum);
    floats(to, row * width).at[channel] = sum * c;
    for (int i = 0; i + 1 < n_taps; ++i) rows[i] = rows[i + 1];
  }
  for (int i = 0; i + 1 < n_taps; ++i) before.at[i * width] = rows[i];
}
