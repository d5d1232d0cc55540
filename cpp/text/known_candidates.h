// KnownCandidates: the candidates of a row of which only the largest logits are known, and how many
// of them a draw from all logits would be from.
//
// Penalties only lower logits here. So known tokens that are more likely than the last known one
// remain more likely than every unknown token.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "backend/largest_logits.h"
#include "text/bucketed_draw.h"
#include "text/candidates.h"
#include "text/penalties.h"

namespace h2o {

class KnownCandidates {
 public:
  // Copies tokens with finite logits, after penalties, to the front of `room`, sorted.
  KnownCandidates(const LargestLogits& largest, Penalties& penalties, std::span<Candidate> room);

  // Is the most likely token unknown?
  bool is_empty() const { return n_certain_ == 0; }
  const Candidate& first() const { return room_[0]; }

  // The number of candidates that top-k keeps; nullopt: some of them are unknown.
  std::optional<size_t> count_largest(size_t k) const;

  // Sets the weights of candidates; returns the number of them that top-p and min-p keep. nullopt:
  // some of them may be unknown, or the sum of their weights depends on the order.
  std::optional<size_t> count_nucleus(float temperature, float top_p, float min_p);

 private:
  const LargestLogits& largest_;
  std::span<Candidate> room_;
  size_t n_ = 0;          // candidates
  size_t n_certain_ = 0;  // the first n_certain_ are more likely than all other tokens
  size_t n_changed_ = 0;  // upper bound of tokens lowered by penalties
  bool are_all_ = false;  // no other token has a finite logit
};

}  // namespace h2o
