// Drafter: proposes the next tokens of a text, so that one forward pass verifies several.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace h2o {

// The step that verifies drafts.
struct DraftStep {
  int32_t most;                   // drafts
  int32_t n_others;               // tokens that it generates for other texts
  std::span<const double> times;  // [most + 1] its duration with n drafts, in any unit
};

// Belongs to one text. A wrong proposal costs time and changes nothing else.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // Tokens that may follow `tokens`, which begins with the tokens of the call before; valid until
  // the next call.
  virtual std::span<const int32_t> propose(std::span<const int32_t> tokens,
                                           const DraftStep& step) = 0;
};

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

  // How often the next token was right after a match of some length.
  struct Rate {
    double right, all;
  };
  Rate& rate(int64_t match);

  void learn(std::span<const int32_t> tokens);
  void look_up(std::span<const int32_t> tokens, int32_t most);
  int32_t best_length(const DraftStep& step);

  // After matches of 1, 2 to 3, 4 to 7, and more tokens; at first guesses that weigh little.
  std::array<Rate, 4> rates_{{{1, 5}, {2, 5}, {3, 5}, {4, 5}}};
  std::vector<int32_t> draft_;
  int64_t match_ = 0;   // tokens before the draft that occurred earlier
  int64_t n_seen_ = 0;  // tokens before the draft
};

}  // namespace h2o
