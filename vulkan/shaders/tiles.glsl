// Tiles of logits. The query heads of a group share its keys, so a workgroup has one list of
// queries: query t of a kv_head is head t % group of its group, in row t / group of the segment.
#define KEYS 32   // of a tile
#define FOURS 16  // of four dimensions, of a tile
#define EIGHTS 8
#define MOST_SPLITS 32  // when decoding, and
#define SPLIT_KEYS 64   // the least keys of a split, as in attention/step.cpp
layout(local_size_x_id = 0) in;
layout(constant_id = 0) const int THREADS = 128;
layout(constant_id = 1) const int QUERIES = 16;  // of a tile
layout(constant_id = 2) const int PARTS = 1;  // of a row, of DIMS dimensions
layout(constant_id = 3) const int K_TYPE = 0;
layout(constant_id = 4) const int V_TYPE = 0;
layout(constant_id = 5) const bool WHOLE = false;  // without a cache, both ways: attend_whole()
const int LANES = THREADS / QUERIES;  // threads of a query
const int OWN = KEYS / LANES;         // keys of a thread: lane, lane + LANES, ...
const int DIMS = 4 * FOURS;

shared vec4 q_tile[QUERIES * FOURS];
shared vec4 tile[KEYS * (FOURS + 1)];  // rows of keys or values, padded
shared float p_tile[QUERIES * KEYS];

int thread() { return int(gl_LocalInvocationIndex); }
int own_query() { return thread() / LANES; }
int own_lane() { return thread() % LANES; }

// The key or the value of a row of the segment.
uint64_t own_row(Step step, Keys keys, uint64_t rows, int key) {
  const int64_t i = int64_t(keys.segment.row + key) * step.n_kv_heads + keys.kv_head;
  return rows + uint64_t(i * step.head_dim * 4);
}

// Elements [i, i + 8) of key number `key`, rotated if positions roll. i is a multiple of 8.
void load_key(Step step, Keys keys, int key, int i, out float x[8]) {
  const int n = step.head_dim, half_dims = step.n_half;
  const uint64_t row = WHOLE ? own_row(step, keys, step.new_k, key) : key_row(step, keys, key);
  load_eight_of(K_TYPE, row, i, n, x);
  if (!keys.segment.rolling || i >= 2 * half_dims) return;
  const bool adjacent = step.pairs != 0, whole = half_dims % 8 == 0;
  float others[8] = x;
  if (!adjacent && whole) {
    load_eight_of(K_TYPE, row, i < half_dims ? i + half_dims : i - half_dims, n, others);
  }
  Floats angles = floats(step.rope_table, int64_t(rank_of(step, keys, key)) * 2 * half_dims);
  for (int j = 0; j < 8 && i + j < 2 * half_dims; ++j) {
    const int d = i + j;
    const bool second = adjacent ? (d & 1) != 0 : d >= half_dims;
    const int pair = adjacent ? d / 2 : d % half_dims;
    float other = others[adjacent ? j ^ 1 : j];
    if (!adjacent && !whole) {
      other = element(K_TYPE, row, second ? d - half_dims : d + half_dims, n);
    }
    const float cosine = angles.at[pair], sine = angles.at[half_dims + pair];
    x[j] = second ? other * sine + x[j] * cosine : x[j] * cosine - other * sine;
  }
}

// Loads dimensions from part * DIMS on of a tile of keys, or of values, and of queries.
void load_rows(Step step, Keys keys, bool values, int first_key, int n_keys, int part) {
  for (int i = thread(); i < KEYS * EIGHTS; i += THREADS) {
    const int key = min(first_key + i / EIGHTS, n_keys - 1), d = part * DIMS + i % EIGHTS * 8;
    float x[8] = float[](0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0);
    if (d < step.head_dim && values) {
      const uint64_t row =
          WHOLE ? own_row(step, keys, step.new_v, key) : value_row(step, keys, key);
      load_eight_of(V_TYPE, row, d, step.head_dim, x);
    } else if (d < step.head_dim) {
      load_key(step, keys, key, d, x);
    }
    const int at = i / EIGHTS * (FOURS + 1) + i % EIGHTS * 2;
    tile[at] = vec4(x[0], x[1], x[2], x[3]);
    tile[at + 1] = vec4(x[4], x[5], x[6], x[7]);
  }
}
void load_queries(Step step, Keys keys, int first_query, int n_queries, int group, int part) {
  for (int i = thread(); i < QUERIES * FOURS; i += THREADS) {
    const int t = min(first_query + i / FOURS, n_queries - 1), d = part * DIMS + i % FOURS * 4;
    const int64_t row = int64_t(keys.segment.row + t / group) * step.n_heads;
    Floats q = floats(step.q, (row + keys.kv_head * group + t % group) * step.head_dim);
    vec4 x = vec4(0.0);
    for (int j = 0; j < 4 && d + j < step.head_dim; ++j) x[j] = q.at[d + j];
    q_tile[i] = x;
  }
}

// A logit after soft-capping and ALiBi; see Attention.
float changed(Step step, Keys keys, float logit, int head, int row, int key) {
  if (step.slopes != 0) {
    const int distance = WHOLE ? abs(row - key) : distance_to(step, keys, row, key);
    logit -= Floats(step.slopes).at[head] * float(distance);
  }
  return step.softcap > 0.0 ? step.softcap * tanh_of(logit / step.softcap) : logit;
}

// Does query t, which exists, see a key?
bool sees(Step step, Keys keys, int t, int group, int key) {
  const int row = t / group;
  if (WHOLE) return step.window == 0 || abs(row - key) < step.window;
  if (key > keys.kept + row) return false;
  if (step.window == 0) return true;
  return position_of(step, keys, key) > keys.segment.position + row - step.window;
}

// The logits of this thread's query and keys.
void multiply_tile(Step step, Keys keys, int first_query, int n_queries, int group, int first_key,
                   int n_keys, out float logits[OWN]) {
  for (int j = 0; j < OWN; ++j) logits[j] = 0.0;
  for (int part = 0; part < PARTS; ++part) {
    barrier();
    load_rows(step, keys, false, first_key, n_keys, part);
    load_queries(step, keys, first_query, n_queries, group, part);
    barrier();
    for (int d = 0; d < FOURS; ++d) {
      const vec4 q = q_tile[own_query() * FOURS + d];
      for (int j = 0; j < OWN; ++j) {
        const vec4 k = tile[(own_lane() + j * LANES) * (FOURS + 1) + d];
        logits[j] = fma(q.x, k.x, fma(q.y, k.y, fma(q.z, k.z, fma(q.w, k.w, logits[j]))));
      }
    }
  }
  const int t = min(first_query + own_query(), n_queries - 1);
  for (int j = 0; j < OWN; ++j) {
    const int key = min(first_key + own_lane() + j * LANES, n_keys - 1);
    logits[j] = changed(step, keys, logits[j] * step.scale, keys.kv_head * group + t % group,
                        t / group, key);
  }
}

// Keys of each split, as many as `most` splits need: whole tiles. It depends on the keys only, not on
// the slots, so that a budget which is never reached gives the bits of the full cache.
int split_length(int n_keys, int n_splits, bool decodes) {
  const int most = decodes ? MOST_SPLITS : n_splits;
  return max(SPLIT_KEYS, ((n_keys + most - 1) / most + KEYS - 1) / KEYS * KEYS);
}

// The sink of a head; -FLT_MAX if NaN, as on the CPU.
float sink_of(Step step, int head) {
  const float sink = Floats(step.sinks).at[head];
  return is_nan(sink) ? -largest_float() : clamp(sink, -largest_float(), largest_float());
}
