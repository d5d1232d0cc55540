// The rule of kv/policy.h, member by member: the conformance cases hold it against that.
#define SUM 0
#define MEAN 1
#define INVERSE 2
#define QUESTION 4
#define RANDOM 5
#define NO_NORM 0
#define OUTPUT_NORM 2
#define QUESTION_ROWS 64
#define NEIGHBORS 12

struct Policy {
  int sinks, heavy, recent, tail_begin, tail_end, scoring;
  float decay;
  int value_norm;
};

int64_t budget(Policy p) { return int64_t(p.sinks) + p.heavy + p.recent; }
int slots_of(Policy p, int most) { return budget(p) + 1 < most ? int(budget(p)) + 1 : most; }
bool evicts(Policy p, int slots) { return slots > budget(p); }
int kept_of(Policy p, int n) { return budget(p) < n ? int(budget(p)) : n; }
bool keeps_scores(Policy p) { return p.heavy > 0 && p.scoring != RANDOM; }
bool weighs_values(Policy p) { return keeps_scores(p) && p.value_norm != NO_NORM; }
int first_scored(Policy p, int n) {
  return p.scoring == QUESTION && n > QUESTION_ROWS ? n - QUESTION_ROWS : 0;
}
float with_received(Policy p, float score, float received) {
  if (p.scoring != QUESTION) return score + received;
  return score < received ? received : score;
}
bool pools_scores(Policy p, int n_evicted) {
  return p.heavy > 0 && p.scoring == QUESTION && n_evicted > 1;
}

float random_number(int position, int next, int head) {
  uint bits = uint(position) * 0x9e3779b1u + uint(next) * 0x85ebca77u + uint(head) * 0xc2b2ae3du;
  bits = (bits ^ bits >> 16) * 0x7feb352du;
  bits = (bits ^ bits >> 15) * 0x846ca68bu;
  return float((bits ^ bits >> 16) >> 8);
}
float importance(Policy p, float score, float norm, int position, int next, int head) {
  if (p.scoring == RANDOM) return random_number(position, next, head);
  if (p.scoring == MEAN) score /= float(next - position);
  if (p.scoring == INVERSE) score = -score;
  return weighs_values(p) ? score * norm : score;
}

int first_recent(Policy p, int next) {
  if (next <= p.recent) return 0;
  const int first = next - p.recent, tail = p.tail_end - p.tail_begin;
  return first + tail >= p.tail_end ? first + tail : first;
}
bool evictable(Policy p, int position, int next) {
  return position >= p.sinks && position < first_recent(p, next) &&
         !(position >= p.tail_begin && position < p.tail_end);
}
