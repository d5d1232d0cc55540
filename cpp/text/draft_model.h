// DraftModel: a model that proposes what another one with the same vocabulary generates
// (speculative decoding, arXiv 2211.17192): a smaller one, or the same one with a smaller cache
// (arXiv 2408.11049, 2605.17613). It proposes its most likely tokens or, if the other samples, what
// that sampler would draw from its logits, with the same random numbers.
//
// Or it is the verifying model's layer for multi-token prediction, which reads hidden states too.
//
// Belongs to one engine. It has a session of its own. Each text has a sequence, which reads the
// proposals too and retracts them. A model that cannot retract tokens reads them in one more
// sequence, a copy.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/process.h"
#include "model/session.h"
#include "text/draft_cost.h"
#include "text/drafter.h"

namespace h2o {

class DraftModel : public std::enable_shared_from_this<DraftModel> {
 public:
  // options: max_sequences is the number of texts that have proposals at the same time, max_drafts
  // the length of proposals; without an archive. n_vocab: tokens of the verifying model. Throws as
  // Session().
  DraftModel(std::shared_ptr<Model> model, SessionOptions options, int32_t n_vocab);

  // Proposes what the model generates with a full cache, whose options differ only in the policies.
  // Its own, smaller cache is filled from that one. Throws InvalidArgument for a model, policy or
  // option that this does not support, and as Session().
  static std::shared_ptr<DraftModel> of_full_cache(std::shared_ptr<Model> model,
                                                   SessionOptions options);

  // Proposes by the model's first layer for multi-token prediction. Throws as
  // next_token_predictor() and Session().
  static std::shared_ptr<DraftModel> of_predictor(const std::shared_ptr<Model>& model,
                                                  SessionOptions options);

  // Allocated bytes of its cache. May be called by any thread.
  size_t cache_bytes() const { return cache_bytes_; }

  // Proposes for a text. Must not outlive this unless it is shared.
  std::shared_ptr<Drafter> drafter();

 private:
  friend class ModelDrafter;

  int32_t take();  // a sequence; -1: all are in use
  void give_back(int32_t sequence) noexcept;

  // The cost of proposals for texts whose steps without drafts take so long.
  ProposalCost cost(double step_seconds) const;

  const int64_t process_ = process_id();  // a forked child may find mutex_ locked
  const int32_t n_vocab_;
  const bool retracts_;
  const int32_t max_drafts_;
  bool fills_ = false;  // its sequences are filled from the cache that verifies
  Session session_;
  std::atomic<size_t> cache_bytes_;
  // Used by the computing thread. The first times are not counted, because memory is new.
  TypicalTime draft_time_{3};
  TypicalTime fill_time_{1};
  GuessRate usual_{4, 5};      // of all texts
  std::mutex mutex_;           // guards free_: texts may end on any thread
  std::vector<int32_t> free_;  // sequences
};

}  // namespace h2o
