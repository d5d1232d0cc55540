// PrefixCache: states of sequences that prompts pass through, so that nobody reads the same
// beginning twice. A state is a snapshot; those used last stay, as many as fit in some bytes.
//
// A prompt is read in chunks whose ends depend on nothing but its tokens and the policy, and so
// does the state there: going on from a state is what reading would have come to, bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <vector>

#include "kv/policy.h"

namespace h2o {

struct PrefixCacheOptions {
  size_t max_bytes = 0;  // 0 = none is kept

  // Keep where each output ended too, so that a conversation goes on in the state that it left, as
  // Chat has it. That state is not the one that the same tokens read as a prompt give: an output
  // then depends on whether the end is still there.
  bool ends = false;
};

class PrefixCache {
 public:
  enum class Kind : uint8_t {
    passed,  // a chunk of a prompt ends here: any prompt that goes on may begin here
    whole,   // the end of a prompt, with its logits: for the same prompt
    ended    // the end of an output: for what goes on after it
  };
  struct Entry {
    Kind kind;
    std::vector<int32_t> tokens;
    std::vector<KvPolicy> policies;
    std::vector<std::byte> state;
  };

  explicit PrefixCache(const PrefixCacheOptions& options) : options_(options) {}

  bool enabled() const { return options_.max_bytes > 0; }
  bool keeps_ends() const { return options_.ends && enabled(); }
  size_t bytes() const { return bytes_; }

  // The state in which most of a prompt has been read; nullptr if none has.
  std::shared_ptr<const Entry> find(std::span<const int32_t> prompt,
                                    std::span<const KvPolicy> policies);

  // Is this state there already?
  bool has(Kind kind, std::span<const int32_t> tokens, std::span<const KvPolicy> policies) const;

  // Those that were not used for longest make room.
  void add(Entry entry);

  // How many tokens a prompt has in common with what is here, at most.
  size_t common(std::span<const int32_t> prompt, std::span<const KvPolicy> policies) const;

 private:
  static size_t size_of(const Entry& entry);

  PrefixCacheOptions options_;
  std::list<std::shared_ptr<const Entry>> entries_;  // the one used last comes first
  size_t bytes_ = 0;
};

// How many tokens two texts begin with alike.
size_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b);

}  // namespace h2o
