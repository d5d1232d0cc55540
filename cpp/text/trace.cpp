#include "text/trace.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace h2o {
namespace {

// The n largest in descending order; ties: the lower token first.
std::vector<int32_t> largest(std::span<const float> logits, size_t n) {
  const auto larger = [&](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  };
  std::vector<int32_t> heap;  // min-heap: its front is the smallest
  for (int32_t i = 0; n > 0 && i < std::ssize(logits); ++i) {
    if (heap.size() == n) {
      if (!larger(i, heap.front())) continue;
      std::ranges::pop_heap(heap, larger);
      heap.pop_back();
    }
    heap.push_back(i);
    std::ranges::push_heap(heap, larger);
  }
  std::ranges::sort_heap(heap, larger);
  return heap;
}

// Reads them as the sampler does: NaN is -infinity, and if the largest is infinite, the tokens that
// have it are equally likely.
std::vector<float> without_nan(std::span<const float> logits) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> made(logits.begin(), logits.end());
  for (float& logit : made) logit = logit == logit ? logit : -kInfinity;
  const float largest = std::ranges::max(made);
  if (std::isinf(largest)) {
    for (float& logit : made) logit = logit == largest ? 0 : -kInfinity;
  }
  return made;
}

}  // namespace

Trace::Trace(const TraceOptions& options) : options_(options) {
  require(options.n_top >= -1, "n_top is ", options.n_top, ", expected 0 or more");
  require(!options.prompt || options.n_top >= 0,
          "log-probabilities of the prompt need n_top, the number of top log-probabilities");
  require(options.kept_every >= 0, "kept_every is ", options.kept_every, ", expected 1 or more");
}

void Trace::add(std::span<const float> given, int32_t token) {
  const std::vector<float> logits = without_nan(given);
  const double most = std::ranges::max(logits);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - most);
  const double normal = most + std::log(sum);
  TokenLogprob one = {token, logits[token] - normal, {}};
  for (const int32_t i : largest(logits, options_.n_top)) {
    one.top.emplace_back(i, logits[i] - normal);
  }
  const std::lock_guard lock(mutex_);
  logprobs_.push_back(std::move(one));
}

void Trace::begin(const Session& session, int32_t sequence) {
  if (session.archive() != nullptr) n_recalls_ = session.archive()->recalls(sequence);
  n_seen_ = session.tokens_seen(sequence);
}

void Trace::observe(const Session& session, int32_t sequence) {
  const Config& config = session.model().config;
  std::vector<int32_t> counts(session.tokens_seen(sequence));
  int32_t n_heads = 0;
  for (int32_t layer = 0; layer < config.n_layers; ++layer) {
    if (!config.attends(layer) || config.kv_source(layer) != layer) continue;
    n_heads += config.sizes(layer).n_kv_heads;
    for (int32_t head = 0; head < config.sizes(layer).n_kv_heads; ++head) {
      for (const KvEntry& entry : session.entries(layer, sequence, head)) ++counts[entry.position];
    }
  }
  Kept kept{session.tokens_kept(sequence), {}, {}};
  for (const int32_t count : counts) {
    kept.shares.push_back(static_cast<float>(count) / static_cast<float>(std::max(n_heads, 1)));
  }
  std::vector<int64_t> n_recalls;
  if (const KvArchive* const archive = session.archive()) {
    n_recalls = archive->recalls(sequence);
    n_recalls_.resize(n_recalls.size());
    const int64_t n_tokens = std::max(std::ssize(counts) - n_seen_, std::ptrdiff_t{1});
    for (int64_t i = 0; i < std::ssize(counts); ++i) {
      const int64_t page = i / archive->page_tokens();
      kept.recalls.push_back(static_cast<float>(n_recalls[page] - n_recalls_[page]) /
                             static_cast<float>(n_tokens * archive->n_heads()));
    }
  }
  const std::lock_guard lock(mutex_);
  kept_ = std::move(kept);
  n_recalls_ = std::move(n_recalls);
  n_seen_ = static_cast<int32_t>(counts.size());
}

size_t Trace::n_logprobs() const {
  const std::lock_guard lock(mutex_);
  return logprobs_.size();
}

std::vector<TokenLogprob> Trace::logprobs(size_t begin, size_t end) const {
  const std::lock_guard lock(mutex_);
  end = std::min(end, logprobs_.size());
  begin = std::min(begin, end);
  return {logprobs_.begin() + static_cast<std::ptrdiff_t>(begin),
          logprobs_.begin() + static_cast<std::ptrdiff_t>(end)};
}

std::optional<Kept> Trace::kept() const {
  const std::lock_guard lock(mutex_);
  return kept_;
}

}  // namespace h2o
