#include "text/prefix_cache.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace h2o {

PrefixCache::PrefixCache(PrefixCacheOptions options, uint64_t scope)
    : options_(std::move(options)) {
  if (!options_.disk.directory.empty()) disk_.emplace(options_.disk, scope);
}

PrefixCache::~PrefixCache() {
  if (!disk_) return;
  for (auto it = entries_.rbegin(); it != entries_.rend(); ++it) disk_->save(**it);
}

size_t PrefixCache::size_of(const PrefixEntry& entry) {
  return entry.state.size() + entry.head.tokens.size() * sizeof(int32_t) +
         entry.head.replies.size() * sizeof(TokenSpan) + sizeof(PrefixEntry);
}

PrefixCache::Entries::iterator PrefixCache::erase(Entries::iterator entry) {
  bytes_ -= size_of(**entry);
  return entries_.erase(entry);
}

FoundPrefix PrefixCache::find(std::span<const int32_t> prompt, std::span<const KvPolicy> policies,
                              std::span<const TokenSpan> replies) {
  auto best = entries_.end();
  size_t n_best = kMinTokens - 1;
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    const size_t n = (*it)->head.usable(prompt, policies, replies);
    if (n <= n_best) continue;
    best = it;
    n_best = n;
  }
  if (disk_) {
    if (std::optional<PrefixEntry> found = disk_->find(prompt, policies, n_best, replies)) {
      auto entry = std::make_shared<const PrefixEntry>(*std::move(found));
      put(entry);
      return {entry, entry->head.usable(prompt, policies, replies)};
    }
  }
  if (best == entries_.end()) return {};
  entries_.splice(entries_.begin(), entries_, best);
  return {*best, n_best};
}

bool PrefixCache::has(const PrefixHead& head) const {
  return std::ranges::any_of(entries_,
                             [&](const auto& entry) { return entry->head.covers(head); }) ||
         (disk_ && disk_->has(head));
}

void PrefixCache::add(PrefixEntry entry) {
  if (has(entry.head)) return;
  for (auto it = entries_.begin(); it != entries_.end();) {
    it = entry.head.covers((*it)->head) ? erase(it) : std::next(it);
  }
  put(std::make_shared<const PrefixEntry>(std::move(entry)));
}

void PrefixCache::put(std::shared_ptr<const PrefixEntry> entry) {
  entries_.push_front(std::move(entry));
  bytes_ += size_of(*entries_.front());
  // An entry that exceeds the limit by itself does not evict the others.
  if (size_of(*entries_.front()) > options_.max_bytes) {
    entries_.splice(entries_.end(), entries_, entries_.begin());
  }
  while (bytes_ > options_.max_bytes) {
    if (disk_) disk_->save(*entries_.back());
    erase(std::prev(entries_.end()));
  }
}

void PrefixCache::forget(const PrefixHead& head, const std::string& why) noexcept {
  if (disk_) disk_->forget(head, why);
  const auto entry =
      std::ranges::find_if(entries_, [&](const auto& one) { return one->head == head; });
  if (entry != entries_.end()) erase(entry);
}

size_t PrefixCache::common(std::span<const int32_t> prompt,
                           std::span<const KvPolicy> policies) const {
  size_t most = disk_ ? disk_->common(prompt, policies) : 0;
  for (const auto& entry : entries_) {
    if (!entry->head.has_policies(policies)) continue;
    most = std::max(most, common_prefix(entry->head.tokens, prompt));
  }
  return most;
}

}  // namespace h2o
