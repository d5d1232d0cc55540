#include "text/prefix_cache.h"

#include <algorithm>
#include <utility>

namespace h2o {

size_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  const size_t n = std::min(a.size(), b.size());
  return std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(n), b.begin()).first -
         a.begin();
}

size_t PrefixCache::size_of(const Entry& entry) {
  return entry.state.size() + entry.tokens.size() * sizeof(int32_t) + sizeof(Entry);
}

std::shared_ptr<const PrefixCache::Entry> PrefixCache::find(std::span<const int32_t> prompt,
                                                            std::span<const KvPolicy> policies) {
  auto best = entries_.end();
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    const Entry& entry = **it;
    const size_t n = entry.tokens.size();
    const bool fits = entry.kind == Kind::whole ? n == prompt.size() : n < prompt.size();
    if (!fits || (best != entries_.end() && n <= (*best)->tokens.size())) continue;
    if (std::ranges::equal(entry.policies, policies) && common_prefix(entry.tokens, prompt) == n) {
      best = it;
    }
  }
  if (best == entries_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, best);
  return *best;
}

bool PrefixCache::has(Kind kind, std::span<const int32_t> tokens,
                      std::span<const KvPolicy> policies) const {
  return std::ranges::any_of(entries_, [&](const auto& entry) {
    return entry->kind == kind && std::ranges::equal(entry->tokens, tokens) &&
           std::ranges::equal(entry->policies, policies);
  });
}

void PrefixCache::add(Entry entry) {
  const size_t size = size_of(entry);
  if (size > options_.max_bytes || has(entry.kind, entry.tokens, entry.policies)) return;
  entries_.push_front(std::make_shared<const Entry>(std::move(entry)));
  bytes_ += size;
  while (bytes_ > options_.max_bytes) {
    bytes_ -= size_of(*entries_.back());
    entries_.pop_back();
  }
}

size_t PrefixCache::common(std::span<const int32_t> prompt,
                           std::span<const KvPolicy> policies) const {
  size_t most = 0;
  for (const auto& entry : entries_) {
    if (!std::ranges::equal(entry->policies, policies)) continue;
    most = std::max(most, common_prefix(entry->tokens, prompt));
  }
  return most;
}

}  // namespace h2o
