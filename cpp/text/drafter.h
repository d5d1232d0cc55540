// Drafter: proposes the next tokens of a text, so that one forward pass verifies several.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace h2o {

class Sampler;
class Session;

// The step that verifies drafts.
struct DraftStep {
  int32_t most;                   // drafts
  int32_t n_others;               // tokens that it generates for other texts
  std::span<const double> times;  // [most + 1] its duration with n drafts, compared with none
  double seconds = 0;             // its duration without drafts; 0: not known
  // The sequence that verifies, which has read all tokens but the last one; -1: not known.
  const Session* session = nullptr;
  int32_t sequence = -1;
  const Sampler* sampler = nullptr;  // of the next token; nullptr: the most likely one
};

// How often guesses are right; older observations count less.
struct GuessRate {
  double right, all;

  double share() const { return right / all; }
  GuessRate lightened() const { return {5 * share(), 5}; }  // one that weighs little
  void add(bool is_right) {
    constexpr double kForget = 0.98;
    right = right * kForget + is_right;
    all = all * kForget + 1;
  }
};

// Calls count(i, is it right?) for each draft, up to the first wrong one, beside the tokens that
// followed.
template <class Count>
void count_guesses(std::span<const int32_t> draft, std::span<const int32_t> followed,
                   const Count& count) {
  for (size_t i = 0; i < std::min(draft.size(), followed.size()); ++i) {
    const bool is_right = draft[i] == followed[i];
    count(i, is_right);
    if (!is_right) break;
  }
}

// Belongs to one text. A wrong proposal costs time and changes nothing else.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // Tokens that may follow `tokens`, which begins with the tokens of the call before; valid until
  // the next call.
  virtual std::span<const int32_t> propose(std::span<const int32_t> tokens,
                                           const DraftStep& step) = 0;

  // Is called after each step of the text, before its drafts are retracted: `sequence` of `session`
  // has read some of `tokens`, or all of them and drafts.
  virtual void observe(std::span<const int32_t> /*tokens*/, Session& /*session*/,
                       int32_t /*sequence*/) noexcept {}
};

// The time that proposing takes, in durations of a step without drafts: for each draft, and for
// each token that the text gains.
struct ProposalCost {
  double draft = 0;
  double token = 0;
};

// The number of drafts that promises the most tokens per second: 0, unless that is a gain.
// right: [n] the chance of each draft to be right if those before it are.
int32_t best_draft_length(const DraftStep& step, std::span<const double> right,
                          const ProposalCost& cost = {});

// Prompt lookup (after arXiv 2304.04487): proposes what followed the longest earlier occurrence of
// the last tokens, the latest if there are several.
//
// It proposes as many tokens as promise the most tokens per second. How often a proposal is right
// is counted, by the length of the match, whether it was verified or not.
class LookupDrafter final : public Drafter {
 public:
  std::span<const int32_t> propose(std::span<const int32_t> tokens, const DraftStep& step) override;

 private:
  static constexpr int32_t kLongest = 16;        // match
  static constexpr int64_t kSearched = 1 << 17;  // latest tokens

  GuessRate& rate(int64_t match);
  void look_up(std::span<const int32_t> tokens, int32_t most);

  // After matches of 1, 2 to 3, 4 to 7, and more tokens; at first guesses that weigh little.
  std::array<GuessRate, 4> rates_{{{1, 5}, {2, 5}, {3, 5}, {4, 5}}};
  std::vector<int32_t> draft_;
  int64_t match_ = 0;  // tokens before the draft that occurred earlier
  size_t n_seen_ = 0;  // tokens before the draft
};

}  // namespace h2o
