// Attention of a tile of queries to a split of the keys, by a running softmax. Writes the result
// and the logarithm of the softmax's sum or, with several splits, partial sums that are merged; and
// when decoding the logits, from which scores are computed.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "kv.glsl"
#include "kv_types.glsl"
#include "tiles.glsl"

layout(push_constant, scalar) uniform Push {
  Step step;
  int first_segment, n_segments, n_tiles, n_splits, decodes;
};
const int OWN_FOURS = FOURS / LANES;  // of each part of a row

shared float largest_of_lane[THREADS];

// The largest x of a query's lanes, or their sum in order.
float of_lanes(float x, bool sums) {
  barrier();
  largest_of_lane[thread()] = x;
  barrier();
  float all = sums ? 0.0 : -largest_float();
  for (int i = 0; i < LANES; ++i) {
    const float other = largest_of_lane[own_query() * LANES + i];
    all = sums ? all + other : max(all, other);
  }
  return all;
}

// Tile number `index` of all segments'.
void attend(int index) {
  const int kv_head = int(gl_WorkGroupID.y), split = int(gl_WorkGroupID.z);
  const Segment segment = segment_at(step, first_segment + index / n_tiles);
  if (!WHOLE && (segment.n_rows == 1) != (decodes != 0)) return;
  Keys keys;
  if (WHOLE) {
    keys.segment = segment;
    keys.kv_head = kv_head;
    keys.kept = 0;
  } else {
    keys = keys_of(step, segment, kv_head);
  }
  const int group = step.n_heads / step.n_kv_heads;
  const int n_queries = segment.n_rows * group;
  const int first_query = (n_tiles - 1 - index % n_tiles) * QUERIES;  // the longest start first
  const int last_row = (min(first_query + QUERIES, n_queries) - 1) / group;
  int n_keys = keys.kept + last_row + 1;
  const int size = split_length(keys.kept + segment.n_rows, n_splits, decodes != 0);
  int begin = split * size;
  if (WHOLE) {
    const int reach = step.window > 0 ? step.window - 1 : segment.n_rows;
    n_keys = min(last_row + reach + 1, segment.n_rows);
    begin = max(first_query / group - reach, 0) / KEYS * KEYS;
  }
  const int end = min(split * size + size, n_keys);
  if (begin >= end) return;

  const int t = first_query + own_query();
  const bool exists = t < n_queries;
  const int head = kv_head * group + t % group;
  // A decoding sequence, or a row of the segment: its place in the workspace.
  const int64_t query =
      int64_t(decodes != 0 ? segment.sequence : t / group) * step.n_heads + head;
  float largest = -largest_float(), total = 0.0;  // finite, as on the CPU
  vec4 sums[PARTS * OWN_FOURS];
  for (int j = 0; j < PARTS * OWN_FOURS; ++j) sums[j] = vec4(0.0);

  for (int first_key = begin; first_key < end; first_key += KEYS) {
    float logits[OWN];
    multiply_tile(step, keys, first_query, n_queries, group, first_key, n_keys, logits);
    bool seen[OWN];
    float most = largest;
    for (int j = 0; j < OWN; ++j) {
      const int key = first_key + own_lane() + j * LANES;
      seen[j] = exists && key < end && sees(step, keys, t, group, key);
      if (seen[j] && !is_nan(logits[j])) most = max(most, logits[j]);
      if (decodes != 0 && step.logits != 0 && exists && key < end) {
        floats(step.logits, query * step.slots).at[key] = seen[j] ? logits[j] : -largest_float();
      }
    }
    most = of_lanes(min(most, largest_float()), false);
    const float correction = exp_negative(largest - most);
    largest = most;
    total *= correction;
    for (int j = 0; j < OWN; ++j) {
      const float p = seen[j] ? exp_negative(logits[j] - largest) : 0.0;
      total += p;
      p_tile[own_query() * KEYS + own_lane() + j * LANES] = p;
    }
    for (int part = 0; part < PARTS; ++part) {
      barrier();
      load_rows(step, keys, true, first_key, end, part);
      barrier();
      for (int j = 0; j < OWN_FOURS; ++j) {
        vec4 sum = vec4(0.0);
        for (int key = 0; key < KEYS; ++key) {
          const vec4 v = tile[key * (FOURS + 1) + own_lane() + j * LANES];
          sum = fma(vec4(p_tile[own_query() * KEYS + key]), v, sum);
        }
        const int i = part * OWN_FOURS + j;
        sums[i] = fma(sums[i], vec4(correction), sum);
      }
    }
  }

  total = of_lanes(total, true);
  if (!exists) return;
  float weight = 1.0;
  if (n_splits == 1) {  // as merge.comp does with one split
    const float own = largest;
    if (step.sinks != 0) largest = max(largest, sink_of(step, head));
    const float sink = step.sinks != 0 ? exp_negative(sink_of(step, head) - largest) : 0.0;
    weight = exp_negative(own - largest);
    total = max(fma(weight, total, sink), 1e-37);  // finite even if all are NaN
  }
  const int64_t partial = query * n_splits + split;
  const int64_t row = int64_t(segment.row + t / group) * step.n_heads + head;
  Floats to = n_splits > 1 ? floats(step.partial_out, partial * step.head_dim)
                           : floats(step.result, row * step.head_dim);
  for (int i = 0; i < PARTS * OWN_FOURS; ++i) {
    const int d = i / OWN_FOURS * DIMS + (own_lane() + i % OWN_FOURS * LANES) * 4;
    for (int j = 0; j < 4 && d + j < step.head_dim; ++j) {
      to.at[d + j] = n_splits > 1 ? sums[i][j] : weight * sums[i][j] / total;
    }
  }
  if (own_lane() > 0) return;
  if (n_splits > 1) {
    floats(step.partial_shift, partial).at[0] = largest;
    floats(step.partial_total, partial).at[0] = total;
  } else if (step.lse != 0) {
    floats(step.lse, query).at[0] = largest + log_of(total);
  }
}

void main() {
  for (int index = int(gl_WorkGroupID.x); index < n_segments * n_tiles;
       index += int(gl_NumWorkGroups.x)) {
    attend(index);
  }
}
