#include "text/bucketed_draw.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

namespace h2o {
namespace {

constexpr size_t kBlock = LogitRow::kBlock;

// Number of buckets, as a power of two.
constexpr int kBucketBits = 10;
constexpr int32_t kBuckets = 1 << kBucketBits;

// Buckets divide the range from the largest logit down to kRange temperatures below it. Tokens
// below that have weights less than e^-60: even 2^31 of them together are less than the rounding
// error of a total in double. They are never drawn and share the last bucket.
constexpr int32_t kNegligibleBucket = kBuckets - 1;
constexpr float kRange = 60;

// Margin of a limit by min-p for rounding, in temperatures.
constexpr float kMargin = 0.01f;

// A bucket with this few candidates is sorted.
constexpr size_t kSmallBucket = 64;

// Maps floats to unsigned integers, largest float first. Both zeros are equal.
uint32_t rank(float logit) {
  const auto bits = std::bit_cast<uint32_t>(logit + 0.0f);
  return bits >> 31 != 0 ? bits : ~bits & 0x7fffffffu;
}

// The first bucket up to `last` for which `reached` holds, or last + 1; adds the buckets before it
// to `before`.
template <typename Amount, typename Reached>
int32_t find_bucket(const Amount* buckets, int32_t last, Amount& before, Reached reached) {
  for (int32_t b = 0; b <= last; ++b) {
    const Amount with = {before.mass + buckets[b].mass, before.count + buckets[b].count};
    if (reached(with)) return b;
    before = with;
  }
  return last + 1;
}

template <typename Value, typename Test>
bool any_in_block(const Value* block, Test test) {
  Value any = 0;  // same width as the values, for vectorization
  for (size_t i = 0; i < kBlock; ++i) any = test(block[i]) ? Value{1} : any;
  return any != 0;
}

}  // namespace

void BucketedDraw::Scratch::resize(const LogitRow& row) {
  const size_t n = row.blocks().size();
  buckets.resize(kBuckets);
  if (bucket_of.size() < n) bucket_of.resize(n);
  if (candidates.size() < n + kBlock) candidates.resize(n + kBlock);
}

BucketedDraw::BucketedDraw(const LogitRow& row, float temperature, const DrawCuts& cuts,
                           Scratch& scratch)
    : row_(row),
      logits_(row.blocks()),
      weight_of_{row.largest(), temperature},
      cuts_(cuts),
      k_(cuts.top_k > 0 ? std::min<size_t>(cuts.top_k, row.size()) : row.size()),
      bucket_of_(std::span(scratch.bucket_of).first(logits_.size())),
      buckets_(scratch.buckets),
      candidates_(scratch.candidates) {}

int32_t BucketedDraw::draw(double u) {
  fill_buckets();
  int32_t last_bucket = kNegligibleBucket - 1;
  const Limit limit = find_limit(last_bucket);
  weigh(last_bucket, limit);

  double total = 0;
  for (int32_t b = 0; b <= last_bucket; ++b) total += buckets_[b].mass;
  // Less than the total, and the search adds in the same order, so it finds a bucket.
  const auto drawn = [left = u * total](const Amount& a) { return a.mass > left; };
  Amount before;
  const int32_t bucket = find_bucket(buckets_.data(), last_bucket, before, drawn);
  return narrow(gather_bucket(bucket, limit, cuts_.min_p), before, drawn).token;
}

// The bucket of a logit at this distance below the largest. NaN (infinity times zero) has no
// weight.
int32_t BucketedDraw::bucket_below(float distance) const {
  const float scaled = distance * scale_;
  return static_cast<int32_t>(scaled < kNegligibleBucket ? scaled : kNegligibleBucket);
}

// The bucket of the logit whose weight is min_p, or of one `margin` temperatures below it.
int32_t BucketedDraw::min_p_bucket(float margin) const {
  const float distance = (margin - std::log(cuts_.min_p)) * weight_of_.temperature;
  return bucket_below(std::max(distance, 0.0f));
}

// Are the masses of buckets worth computing? Min-p alone keeps few tokens.
bool BucketedDraw::has_masses() const {
  return cuts_.top_p < 1 || cuts_.top_k > 0 || cuts_.min_p == 0;
}

void BucketedDraw::fill_buckets() {
  const float width =
      std::abs(weight_of_.largest - row_.smallest_finite());  // -0 if both are zeros
  const float range = std::min(width, kRange * weight_of_.temperature);
  scale_ = std::min((kNegligibleBucket - 1) / range, std::numeric_limits<float>::max());
  std::fill(buckets_.begin(), buckets_.end(), Amount{});
  const bool masses = has_masses();
  const bool needs_counts = k_ < row_.size();  // for top-k
  const auto [largest, temperature] = weight_of_;
  for (size_t at = 0; at < logits_.size(); at += kBlock) {
    int32_t bucket[kBlock];
    const float* const logit = &logits_[at];
    for (size_t i = 0; i < kBlock; ++i) bucket[i] = bucket_below(largest - logit[i]);
    int16_t* const bucket_of = &bucket_of_[at];
    for (size_t i = 0; i < kBlock; ++i) bucket_of[i] = static_cast<int16_t>(bucket[i]);
    if (!masses) continue;
    float weight[kBlock];
    for (size_t i = 0; i < kBlock; ++i) {
      const float x = (logit[i] - largest) / temperature;
      // in a separate loop: otherwise GCC 12 does not vectorize it
      weight[i] = x > kMinPower ? x : kMinPower;
    }
    for (size_t i = 0; i < kBlock; ++i) weight[i] = fast_exp(weight[i]);
    for (size_t i = 0; i < kBlock; ++i) {
      if (bucket[i] == kNegligibleBucket) continue;
      Amount& amount = buckets_[bucket[i]];
      amount.mass += weight[i];
      if (needs_counts) ++amount.count;
    }
  }
}

// The limit set by top-k and top-p, and the last bucket with candidates kept by them and min-p.
BucketedDraw::Limit BucketedDraw::find_limit(int32_t& last_bucket) {
  Limit limit = {-std::numeric_limits<float>::infinity(), 0};
  Amount kept;
  // Without top-k, counts are zero and the limit is never reached.
  const auto enough_tokens = [most = static_cast<int64_t>(k_)](const Amount& a) {
    return a.count >= most;
  };
  const int32_t k_bucket = find_bucket(buckets_.data(), last_bucket, kept, enough_tokens);
  if (k_bucket <= last_bucket) {
    const size_t n = gather_bucket(k_bucket, limit, 0);
    limit = narrow(n, kept, enough_tokens);
    last_bucket = k_bucket;
  }
  if (cuts_.min_p > 0) last_bucket = std::min(last_bucket, min_p_bucket(kMargin));
  if (cuts_.top_p < 1) {
    const double mass = cuts_.top_p * static_cast<float>(kept.mass);
    const auto enough_mass = [mass](const Amount& a) { return a.mass >= mass; };
    Amount before;
    const int32_t p_bucket = find_bucket(buckets_.data(), last_bucket, before, enough_mass);
    if (p_bucket <= last_bucket) {
      const size_t n = gather_bucket(p_bucket, limit, 0);
      limit = narrow(n, before, enough_mass);
      last_bucket = p_bucket;
    }
  }
  return limit;
}

// The weight of a token; negative if it is past the limit or its weight is below min_weight.
float BucketedDraw::weight_if_kept(size_t token, const Limit& limit, float min_weight) const {
  const float logit = logits_[token];
  const bool beyond =
      logit < limit.logit || (logit == limit.logit && static_cast<int32_t>(token) > limit.token);
  if (beyond) return -1;
  const float weight = weight_of_(logit);
  return weight >= min_weight ? weight : -1;
}

// Calls visit(token) for tokens in buckets for which `wanted` holds. Finds them per block first,
// without branches, which would be unpredictable.
template <typename Wanted, typename Visit>
void BucketedDraw::for_tokens(Wanted wanted, Visit visit) const {
  for (size_t at = 0; at < bucket_of_.size(); at += kBlock) {
    const int16_t* const block = &bucket_of_[at];
    if (!any_in_block(block, wanted)) continue;
    uint8_t found[kBlock];
    size_t n = 0;
    for (size_t i = 0; i < kBlock; ++i) {
      found[n] = static_cast<uint8_t>(i);
      n += wanted(block[i]) ? 1 : 0;
    }
    for (size_t i = 0; i < n; ++i) visit(at + found[i]);
  }
}

// Leaves in the masses only the candidates that top-k, top-p and min-p keep: those of the first
// buckets, which keep all, stay.
void BucketedDraw::weigh(int32_t last_bucket, const Limit& limit) {
  int32_t first = has_masses() ? last_bucket + 1 : 0;
  if (limit.logit > -kInfinity)
    first = std::min(first, bucket_below(weight_of_.largest - limit.logit));
  if (cuts_.min_p > 0) first = std::min(first, min_p_bucket(-kMargin));
  std::fill(buckets_.begin() + first, buckets_.end(), Amount{});
  for_tokens([=](int16_t bucket) { return first <= bucket && bucket <= last_bucket; },
             [&](size_t token) {
               const float weight = weight_if_kept(token, limit, cuts_.min_p);
               if (weight > 0) buckets_[bucket_of_[token]].mass += weight;
             });
}

// Copies the kept candidates of a bucket to the front of candidates_ in token order; returns their
// number.
size_t BucketedDraw::gather_bucket(int32_t bucket, const Limit& limit, float min_weight) {
  size_t n = 0;
  for_tokens([bucket](int16_t b) { return b == bucket; },
             [&](size_t token) {
               const float weight = weight_if_kept(token, limit, min_weight);
               if (weight < 0) return;
               candidates_[n++] = {static_cast<int32_t>(token), logits_[token], weight};
             });
  return n;
}

// The first of n candidates in sorted order for which `reached` holds, or the last one with a
// weight; adds the candidates up to it to `before`. The candidates are in token order.
template <typename Reached>
BucketedDraw::Limit BucketedDraw::narrow(size_t n, Amount& before, Reached reached) {
  const auto begin = candidates_.begin();
  // Equal logits are already ordered. Each round fixes kBucketBits more bits.
  while (n > 1) {
    float smallest = candidates_[0].logit;
    float largest = smallest;
    for (size_t i = 1; i < n; ++i) {
      smallest = std::min(smallest, candidates_[i].logit);
      largest = std::max(largest, candidates_[i].logit);
    }
    if (smallest == largest) break;
    if (n <= kSmallBucket) {
      std::sort(begin, begin + n, likelier);
      break;
    }
    const uint32_t first = rank(largest);
    const int shift = std::max(0, 32 - std::countl_zero(rank(smallest) - first) - kBucketBits);
    const auto bucket_of = [=](float logit) {
      return static_cast<int32_t>((rank(logit) - first) >> shift);
    };
    std::array<Amount, kBuckets> buckets{};
    for (size_t i = 0; i < n; ++i) {
      Amount& bucket = buckets[bucket_of(candidates_[i].logit)];
      bucket.mass += candidates_[i].weight;
      ++bucket.count;
    }
    const int32_t found = find_bucket(buckets.data(), bucket_of(smallest) - 1, before, reached);
    const auto end = std::remove_if(
        begin, begin + n, [=](const Candidate& c) { return bucket_of(c.logit) != found; });
    n = end - begin;
  }
  size_t last = 0;
  for (size_t i = 0; i < n; ++i) {
    if (candidates_[i].weight > 0) last = i;
    before.mass += candidates_[i].weight;
    ++before.count;
    if (reached(before)) break;
  }
  return {candidates_[last].logit, candidates_[last].token};
}

}  // namespace h2o
