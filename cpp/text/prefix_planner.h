// PrefixPlanner: decides which states of a session's sequences are saved in the prefix cache, saves
// them, and starts prompts from them.
//
// Prefixes of plain states are usable too, so it is enough to save the end of the sequence and, for
// long prompts, the end of the prompt once its first token has been generated. Otherwise the ends
// of the prompt and of the output are saved, the last chunk end, and the last one inside the common
// prefix with other prompts, since further prompts may diverge there too.
//
// A prompt may have replies of earlier requests, whose tokens are read one by one, as they were
// generated: then the state is the one at the end of the earlier request. Chunks begin again after
// a reply.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "model/session.h"
#include "text/prefix_cache.h"

namespace h2o {

// Which states of a sequence are still to be saved.
struct PrefixPlan {
  // The sequence has read all tokens from the first on, without a loaded snapshot.
  bool is_from_beginning = true;
  size_t n_prompt = 0;
  bool is_end_wanted = false;        // the state after the prompt, with its logits
  std::vector<size_t> save_at = {};  // numbers of tokens
};

// A sequence and its plan.
struct PrefixReader {
  int32_t sequence;
  std::span<const int32_t> tokens;  // the prompt, and what was generated after it
  std::span<const KvPolicy> policies;
  PrefixPlan& plan;
  std::span<const TokenSpan> replies = {};
};

class PrefixPlanner {
 public:
  // n_batch: chunk size of prompts. `session` must outlive it.
  PrefixPlanner(Session& session, int32_t n_batch, const PrefixCacheOptions& options);

  bool enabled() const { return cache_.enabled(); }
  size_t bytes() const { return cache_.bytes(); }

  // The state that covers the most tokens of a prompt.
  FoundPrefix find(std::span<const int32_t> prompt, std::span<const KvPolicy> policies,
                   std::span<const TokenSpan> replies = {}) {
    return cache_.find(prompt, policies, replies);
  }

  // Loads a state into an empty sequence. Its logits, if it has any, replace `logits`, which must
  // have room for them. Returns false if it turns out to be invalid: the sequence is empty again.
  bool load(const FoundPrefix& prefix, const PrefixReader& reader, std::vector<float>& logits);

  // Plans for a reader that has its whole prompt; n_cached of its tokens were found.
  void plan(const PrefixReader& reader, size_t n_cached);

  // Plans that a reader saves a state from which another prompt can start; n_cached tokens of that
  // prompt were found. Returns false if the reader will reach no state that covers enough more.
  bool plan_for(const PrefixReader& reader, std::span<const int32_t> prompt,
                std::span<const KvPolicy> policies, size_t n_cached,
                std::span<const TokenSpan> replies = {});

  // Saves the states that were planned for this point, with the logits after the last token if they
  // are known. A state that cannot be saved is dropped: there is no memory, or a device has failed,
  // which the next step reports.
  void save(const PrefixReader& reader, std::span<const float> logits) noexcept;

  // Saves the end of an output, or drops it as save() does.
  void save_end(const PrefixReader& reader) noexcept;

 private:
  size_t last_end(const PrefixReader& reader, size_t n) const;
  PrefixKind kind_of(const PrefixReader& reader, size_t n) const;
  void add(const PrefixReader& reader, PrefixKind kind, std::span<const float> logits);

  Session& session_;
  const size_t n_batch_;
  PrefixCache cache_;
};

}  // namespace h2o
