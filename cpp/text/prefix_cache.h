// PrefixCache: states of sequences that prompts pass through, so that nobody reads the same
// beginning twice. A state is a snapshot; those used last stay, as many as fit in some bytes, and
// the others go to disk, where there is a directory for them.
//
// A prompt is read in chunks whose ends depend on nothing but its tokens and the policy, and so
// does the state there: going on from a state is what reading would have come to, bit for bit.
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
  size_t max_bytes = 0;  // in memory; 0 = none is kept there

  // Keep where each output ended too, so that a conversation goes on in the state that it left, as
  // Chat has it. That state is not the one that the same tokens read as a prompt give: an output
  // then depends on whether the end is still there.
  bool ends = false;

  PrefixDiskOptions disk = {};
};

struct FoundPrefix {
  std::shared_ptr<const PrefixEntry> entry;  // nullptr: none
  size_t n_tokens = 0;                       // of the prompt that need not be read
};

class PrefixCache {
 public:
  // scope: as PrefixDisk has it. Throws FileError.
  PrefixCache(PrefixCacheOptions options, uint64_t scope);

  // What is in memory goes to disk.
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  bool enabled() const { return options_.max_bytes > 0 || disk_; }
  bool keeps_ends() const { return options_.ends && enabled(); }
  size_t bytes() const { return bytes_; }  // in memory

  static constexpr size_t kLeast = 32;  // fewer tokens are read about as fast as a state is copied

  // The state in which most of a prompt has been read.
  FoundPrefix find(std::span<const int32_t> prompt, std::span<const KvPolicy> policies);

  // Is this state there already, or one that covers it?
  bool has(const PrefixHead& head) const;

  // Those that it covers, and those that were not used for longest, make room.
  void add(PrefixEntry entry);

  // A state that was found is of no use.
  void forget(const PrefixHead& head, const std::string& why) noexcept;

  // How many tokens a prompt has in common with what is here, at most.
  size_t common(std::span<const int32_t> prompt, std::span<const KvPolicy> policies) const;

 private:
  using Entries = std::list<std::shared_ptr<const PrefixEntry>>;

  static size_t size_of(const PrefixEntry& entry);
  Entries::iterator erase(Entries::iterator entry);
  void put(std::shared_ptr<const PrefixEntry> entry);

  PrefixCacheOptions options_;
  std::optional<PrefixDisk> disk_;
  Entries entries_;  // the one used last comes first
  size_t bytes_ = 0;
};

}  // namespace h2o
