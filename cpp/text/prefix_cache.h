// PrefixCache: saved states of sequences, so that common prompt prefixes are processed once. A
// state is a snapshot. Least recently used states move to disk, if a directory is configured, above
// a size limit.
//
// The ends of a prompt's chunks depend only on its tokens, its replies and the policy, and so do
// the states there: continuing from one gives, bit for bit, the result of processing the whole
// prompt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>

#include "text/prefix_disk.h"
#include "text/prefix_entry.h"

namespace h2o {

struct PrefixCacheOptions {
  size_t max_bytes = 0;  // limit in memory; 0 = no states in memory

  // Also save the state at the end of each output, so that a conversation continues from it, as
  // Chat does. That state differs from the one after processing the same tokens as a prompt, so
  // outputs depend on whether it is still cached.
  bool ends = false;

  PrefixDiskOptions disk = {};
};

struct FoundPrefix {
  std::shared_ptr<const PrefixEntry> entry;  // nullptr: not found
  size_t n_tokens = 0;                       // of the prompt, covered by the entry
};

class PrefixCache {
 public:
  // scope: see PrefixDisk. Throws FileError.
  PrefixCache(PrefixCacheOptions options, uint64_t scope);

  // Writes entries in memory to disk.
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  bool enabled() const { return options_.max_bytes > 0 || disk_; }
  bool keeps_ends() const { return options_.ends && enabled(); }
  size_t bytes() const { return bytes_; }  // in memory

  // copying a state is not faster than processing fewer tokens
  static constexpr size_t kMinTokens = 32;

  // The state that covers the most tokens of a prompt.
  FoundPrefix find(std::span<const int32_t> prompt, std::span<const KvPolicy> policies,
                   std::span<const TokenSpan> replies = {});

  // Is there an entry that is equal to or covers this one?
  bool has(const PrefixHead& head) const;

  // Replaces entries that it covers; evicts the least recently used.
  void add(PrefixEntry entry);

  // Removes a state that turned out to be unusable.
  void forget(const PrefixHead& head, const std::string& why) noexcept;

  // The longest common prefix of a prompt with any state.
  size_t common(std::span<const int32_t> prompt, std::span<const KvPolicy> policies) const;

 private:
  using Entries = std::list<std::shared_ptr<const PrefixEntry>>;

  static size_t size_of(const PrefixEntry& entry);
  Entries::iterator erase(Entries::iterator entry);
  void put(std::shared_ptr<const PrefixEntry> entry);

  PrefixCacheOptions options_;
  std::optional<PrefixDisk> disk_;
  Entries entries_;  // most recently used first
  size_t bytes_ = 0;
};

}  // namespace h2o
