// Scheduler: the prefix cache: which states are saved, and which prompts start from one.
#include <algorithm>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "text/scheduler.h"

namespace h2o {

constexpr size_t kMinTokens = PrefixCache::kMinTokens;

// Everything except tokens and policies that the bits of a state depend on.
uint64_t Scheduler::prefix_scope(const Session& session, int32_t n_batch,
                                 const std::string& build) {
  const SessionOptions& options = session.options();
  const ArchiveOptions& archive = options.archive;
  std::string heads;
  for (const int32_t head : archive.heads) heads += text("|", head);
  const std::string scope =
      text(build, "|", kSnapshotVersion, "|", session.model().fingerprint, "|",
           session.model().backend->kernels(), "|", options.n_ctx, "|", n_batch, "|",
           static_cast<int>(options.positions), "|", static_cast<int>(options.k_dtype), "|",
           static_cast<int>(options.v_dtype), "|", archive.n_recalled, "|",
           static_cast<int>(archive.k_dtype), "|", static_cast<int>(archive.v_dtype), heads);
  return checksum(std::as_bytes(std::span(scope)));
}

// Loads a state from the prefix cache. If the entry turns out to be invalid, the whole prompt is
// processed.
bool Scheduler::load_prefix(Generation& g, const FoundPrefix& prefix, int32_t sequence) {
  const auto& [head, state] = *prefix.entry;
  try {
    if (head.kind == PrefixKind::plain) {
      session_.load_plain(sequence, state, static_cast<int32_t>(prefix.n_tokens));
      return true;
    }
    const std::vector<float> logits = session_.load(sequence, state).logits;
    g.logits_.assign(logits.begin(), logits.end());  // without allocating: reserved by prepare()
    return true;
  } catch (const FormatError& error) {
    prefixes_.forget(head, error.what());
    session_.reset(sequence, policies_of(g));
    return false;
  }
}

std::span<const KvPolicy> Scheduler::policies_of(const Generation& g) const {
  return g.request_.policies.empty() ? session_.options().policies : g.request_.policies;
}

// Can tokens of this generation's prompt be skipped?
bool Scheduler::may_begin_in_prefix(const Generation& g) const {
  return prefixes_.enabled() && g.parked_.empty() && g.from_beginning_ && !needs_every_row(g);
}

// Prefixes of plain states are usable, so it is enough to save the end of the sequence and, for
// long prompts, the end of the prompt once its first token has been generated. Otherwise states at
// chunk ends are saved: the last one, and the last one inside the common prefix with other prompts,
// since further prompts may diverge there too.
void Scheduler::plan_prefixes(Generation& g, int32_t sequence, size_t n_cached) {
  g.save_at_.clear();
  g.saves_whole_ = false;
  if (!prefixes_.enabled() || !g.from_beginning_) return;
  if (session_.is_plain(sequence)) {
    if (g.tokens_.size() >= n_cached + n_batch_) g.save_at_.push_back(g.tokens_.size() + 1);
    return;
  }
  const size_t last = (g.tokens_.size() - 1) / n_batch_ * n_batch_;
  const size_t fork = prefixes_.common(g.tokens_, policies_of(g)) / n_batch_ * n_batch_;
  for (const size_t at : {std::min(fork, last), last}) {
    if (at > n_cached && at >= kMinTokens) g.save_at_.push_back(at);
  }
}

// Will another generation of this step soon reach a state that this one can start from?
bool Scheduler::waits_for_prefix(const Generation& g, size_t n_cached,
                                 std::span<const StepOutput> outputs) {
  for (const StepOutput& output : outputs) {
    Generation& o = *output.generation;
    if (&o == &g || o.sequence_ < 0 || !slots_[o.sequence_].active || output.error != nullptr ||
        output.deferred || !o.from_beginning_ || !o.reads_prompt() ||
        !std::ranges::equal(policies_of(o), policies_of(g))) {
      continue;
    }
    const auto read = static_cast<size_t>(session_.tokens_seen(o.sequence_));
    if (read == o.tokens_.size()) continue;  // it samples its first token now
    const size_t common = common_prefix(o.tokens_, g.tokens_);
    if (common == g.tokens_.size() && common == o.tokens_.size()) {
      if (common < n_cached + kMinTokens) continue;
      o.saves_whole_ = true;
      return true;
    }
    const size_t at = std::min(common, g.tokens_.size() - 1) / n_batch_ * n_batch_;
    if (at < n_cached + kMinTokens || at <= read || at >= o.tokens_.size()) continue;
    if (std::ranges::find(o.save_at_, at) == o.save_at_.end()) o.save_at_.push_back(at);
    return true;
  }
  return false;
}

// After a step. A state that cannot be saved is dropped: for lack of memory, or as a device failed,
// which the next step reports.
void Scheduler::save_prefixes(Generation& g, std::span<const float> logits) noexcept {
  if (!prefixes_.enabled() || !g.from_beginning_) return;
  try {
    const auto seen = static_cast<size_t>(session_.tokens_seen(g.sequence_));
    // The beginning of a plain state is one too, so a later one does as well.
    const bool plain = session_.is_plain(g.sequence_);
    if (std::erase_if(g.save_at_, [&](size_t at) { return plain ? at <= seen : at == seen; }) > 0) {
      save_prefix(g, plain ? PrefixKind::plain : PrefixKind::chunk_end, {});
    }
    if (g.saves_whole_ && g.reads_prompt() && seen == g.tokens_.size() && !logits.empty()) {
      g.saves_whole_ = false;
      save_prefix(g, PrefixKind::prompt_end, logits);
    }
  } catch (...) {
  }
}

void Scheduler::save_end(const Generation& g) noexcept {
  if (!prefixes_.enabled() || g.request_.max_tokens == 0) return;
  try {
    if (static_cast<size_t>(session_.tokens_seen(g.sequence_)) < kMinTokens) return;
    if (g.from_beginning_ && session_.is_plain(g.sequence_)) {
      save_prefix(g, PrefixKind::plain, {});
    } else if (prefixes_.keeps_ends()) {
      save_prefix(g, PrefixKind::output_end, {});
    }
  } catch (...) {
  }
}

void Scheduler::save_prefix(const Generation& g, PrefixKind kind, std::span<const float> logits) {
  const std::span<const int32_t> read =
      std::span(g.tokens_).first(session_.tokens_seen(g.sequence_));
  const std::span<const KvPolicy> policies = policies_of(g);
  PrefixHead head{kind, {read.begin(), read.end()}, {policies.begin(), policies.end()}};
  if (prefixes_.has(head)) return;
  SnapshotText text;
  text.tokens = head.tokens;
  text.logits.assign(logits.begin(), logits.end());
  prefixes_.add({std::move(head), session_.save(g.sequence_, std::move(text))});
}

}  // namespace h2o
