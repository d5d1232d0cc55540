#include "text/prefix_planner.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"

namespace h2o {
namespace {

constexpr size_t kMinTokens = PrefixCache::kMinTokens;

// Everything except tokens and policies that the bits of a state depend on.
uint64_t scope_of(const Session& session, int32_t n_batch, const std::string& build) {
  const SessionOptions& options = session.options();
  const ArchiveOptions& archive = options.archive;
  std::string heads;
  for (const int32_t head : archive.heads) heads += concat("|", head);
  const std::string scope =
      concat(build, "|", kSnapshotVersion, "|", session.model().fingerprint, "|",
             session.model().backend->kernels(), "|", options.n_ctx, "|", n_batch, "|",
             static_cast<int>(options.positions), "|", static_cast<int>(options.k_dtype), "|",
             static_cast<int>(options.v_dtype), "|", archive.n_recalled, "|",
             static_cast<int>(archive.k_dtype), "|", static_cast<int>(archive.v_dtype), heads);
  return checksum(std::as_bytes(std::span(scope)));
}

}  // namespace

PrefixPlanner::PrefixPlanner(Session& session, int32_t n_batch, const PrefixCacheOptions& options)
    : session_(session),
      n_batch_(static_cast<size_t>(n_batch)),
      cache_(options, scope_of(session, n_batch, options.disk.build)) {}

bool PrefixPlanner::load(const FoundPrefix& prefix, const PrefixReader& reader,
                         std::vector<float>& logits) {
  const auto& [head, state] = *prefix.entry;
  try {
    if (head.kind == PrefixKind::plain) {
      session_.load_plain(reader.sequence, state, static_cast<int32_t>(prefix.n_tokens));
      return true;
    }
    const std::vector<float> saved = session_.load(reader.sequence, state).logits;
    logits.assign(saved.begin(), saved.end());
    return true;
  } catch (const FormatError& error) {
    cache_.forget(head, error.what());
    session_.reset(reader.sequence, reader.policies);
    return false;
  }
}

void PrefixPlanner::plan(const PrefixReader& reader, size_t n_cached) {
  PrefixPlan& plan = reader.plan;
  const size_t n = plan.n_prompt = reader.tokens.size();
  plan.save_at.clear();
  plan.is_end_wanted = false;
  if (!enabled() || !plan.is_from_beginning) return;
  if (session_.is_plain(reader.sequence)) {
    if (n >= n_cached + n_batch_) plan.save_at.push_back(n + 1);
    return;
  }
  plan.is_end_wanted = n >= kMinTokens && n > n_cached;
  const size_t last = last_end(reader, n - 1);
  const size_t fork = last_end(reader, cache_.common(reader.tokens, reader.policies));
  for (const size_t at : {std::min(fork, last), last}) {
    if (at > n_cached && at >= kMinTokens) plan.save_at.push_back(at);
  }
}

// The last point up to the n-th token where a longer prompt may continue: the end of a whole chunk,
// or in a reply.
size_t PrefixPlanner::last_end(const PrefixReader& reader, size_t n) const {
  size_t begin = 0;  // of the chunks
  for (const TokenSpan& reply : reader.replies) {
    if (n <= reply.begin) break;
    if (n <= reply.end) return n;
    begin = reply.end;
  }
  return begin + (n - begin) / n_batch_ * n_batch_;
}

PrefixKind PrefixPlanner::kind_of(const PrefixReader& reader, size_t n) const {
  const bool in_reply = std::ranges::any_of(
      reader.replies, [&](const TokenSpan& reply) { return reply.begin < n && n <= reply.end; });
  return in_reply ? PrefixKind::reply : PrefixKind::chunk_end;
}

bool PrefixPlanner::plan_for(const PrefixReader& reader, std::span<const int32_t> prompt,
                             std::span<const KvPolicy> policies, size_t n_cached,
                             std::span<const TokenSpan> replies) {
  PrefixPlan& plan = reader.plan;
  if (!plan.is_from_beginning || !std::ranges::equal(reader.policies, policies)) return false;
  const auto n_read = static_cast<size_t>(session_.tokens_seen(reader.sequence));
  const size_t n = reader.tokens.size();
  if (n_read == n) return false;  // it samples its first token now
  const size_t common = common_prefix(reader.tokens, prompt);
  if (common == prompt.size() && common == n && std::ranges::equal(replies, reader.replies)) {
    if (common < n_cached + kMinTokens) return false;
    plan.is_end_wanted = true;
    return true;
  }
  const size_t at = last_end(reader, std::min(common, prompt.size() - 1));
  if (clipped(replies, at) != clipped(reader.replies, at)) return false;
  if (at < n_cached + kMinTokens || at <= n_read || at >= n) return false;
  if (std::ranges::find(plan.save_at, at) == plan.save_at.end()) plan.save_at.push_back(at);
  return true;
}

void PrefixPlanner::save(const PrefixReader& reader, std::span<const float> logits) noexcept {
  PrefixPlan& plan = reader.plan;
  if (!enabled() || !plan.is_from_beginning) return;
  try {
    const auto n_read = static_cast<size_t>(session_.tokens_seen(reader.sequence));
    // The beginning of a plain state is one too, so a later one does as well.
    const bool plain = session_.is_plain(reader.sequence);
    const auto is_due = [&](size_t at) { return plain ? at <= n_read : at == n_read; };
    if (std::erase_if(plan.save_at, is_due) > 0) {
      add(reader, plain ? PrefixKind::plain : kind_of(reader, n_read), {});
    }
    if (plan.is_end_wanted && n_read == plan.n_prompt && !logits.empty()) {
      plan.is_end_wanted = false;
      add(reader, PrefixKind::prompt_end, logits);
    }
  } catch (...) {
  }
}

void PrefixPlanner::save_end(const PrefixReader& reader) noexcept {
  if (!enabled()) return;
  try {
    if (static_cast<size_t>(session_.tokens_seen(reader.sequence)) < kMinTokens) return;
    if (reader.plan.is_from_beginning && session_.is_plain(reader.sequence)) {
      add(reader, PrefixKind::plain, {});
    } else if (cache_.keeps_ends()) {
      add(reader, PrefixKind::output_end, {});
    } else if (reader.plan.is_from_beginning && session_.replays()) {
      std::vector<TokenSpan> replies(reader.replies.begin(), reader.replies.end());
      replies.push_back({reader.plan.n_prompt, reader.tokens.size()});
      add({reader.sequence, reader.tokens, reader.policies, reader.plan, replies},
          PrefixKind::reply, {});
    }
  } catch (...) {
  }
}

void PrefixPlanner::add(const PrefixReader& reader, PrefixKind kind,
                        std::span<const float> logits) {
  const std::span<const int32_t> read =
      reader.tokens.first(static_cast<size_t>(session_.tokens_seen(reader.sequence)));
  PrefixHead head{kind,
                  {read.begin(), read.end()},
                  {reader.policies.begin(), reader.policies.end()},
                  clipped(reader.replies, read.size())};
  if (cache_.has(head)) return;
  SnapshotText text;
  text.tokens = head.tokens;
  text.logits.assign(logits.begin(), logits.end());
  cache_.add({std::move(head), session_.save(reader.sequence, std::move(text))});
}

}  // namespace h2o
