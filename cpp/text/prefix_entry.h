// PrefixEntry: a saved state of a sequence that prompts can start from, and its key.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/policy.h"

namespace h2o {

enum class PrefixKind : uint8_t {
  chunk_end,   // the end of a chunk of a prompt: usable by longer prompts
  prompt_end,  // the end of a prompt, with its logits: usable by the same prompt, and by prompts in
               // which a reply begins there
  output_end,  // the end of an output: usable by prompts that continue it, though not exact
  plain,  // depends on its tokens alone, not on how they were processed: any prefix of it is usable
          // too
  reply   // inside a reply, or at its end: usable by prompts that have this reply
};

// Tokens [begin, end) of a sequence.
struct TokenSpan {
  size_t begin, end;

  bool operator==(const TokenSpan&) const = default;
};

// The spans, ascending, of the first n tokens.
inline std::vector<TokenSpan> clipped(std::span<const TokenSpan> spans, size_t n) {
  std::vector<TokenSpan> found;
  for (const auto& [begin, end] : spans) {
    if (begin < n) found.push_back({begin, std::min(end, n)});
  }
  return found;
}

// The length of the longest common prefix.
inline size_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  const size_t n = std::min(a.size(), b.size());
  return std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(n), b.begin()).first -
         a.begin();
}

struct PrefixHead {
  PrefixKind kind;
  std::vector<int32_t> tokens;
  std::vector<KvPolicy> policies;
  std::vector<TokenSpan> replies = {};  // that were read as they were generated

  bool operator==(const PrefixHead&) const = default;

  bool has_policies(std::span<const KvPolicy> others) const {
    return std::ranges::equal(policies, others);
  }

  // The number of tokens of this prompt, which has these replies, that need not be processed.
  size_t usable(std::span<const int32_t> prompt, std::span<const KvPolicy> others,
                std::span<const TokenSpan> its_replies = {}) const {
    if (prompt.empty() || !has_policies(others)) return 0;
    const size_t n = tokens.size(), common = common_prefix(tokens, prompt);
    if (kind == PrefixKind::plain) return std::min(common, prompt.size() - 1);
    if (common < n) return 0;
    if (kind == PrefixKind::output_end) return n < prompt.size() ? n : 0;
    if (clipped(its_replies, n) != replies) return 0;
    if (kind != PrefixKind::prompt_end) return n < prompt.size() ? n : 0;
    const bool begins = std::ranges::find(its_replies, n, &TokenSpan::begin) != its_replies.end();
    return n == prompt.size() || begins ? n : 0;
  }

  // Does this entry make the other one redundant?
  bool covers(const PrefixHead& other) const {
    if (kind != PrefixKind::plain || other.kind != kind) return *this == other;
    return policies == other.policies && common_prefix(tokens, other.tokens) == other.tokens.size();
  }
};

struct PrefixEntry {
  PrefixHead head;
  std::vector<std::byte> state;  // a snapshot
};

}  // namespace h2o
