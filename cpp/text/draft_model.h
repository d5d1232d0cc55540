// DraftModel: a smaller model that proposes what a larger one with the same vocabulary generates
// (speculative decoding, arXiv 2211.17192). Its proposals are its most likely tokens.
//
// Belongs to one engine. It has a session of its own, whose cache may be much smaller than that of
// the larger model. Each text has a sequence, which has only read tokens that are known. One more
// sequence is a copy that reads its own proposals.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/process.h"
#include "model/session.h"
#include "text/drafter.h"

namespace h2o {

class DraftModel : public std::enable_shared_from_this<DraftModel> {
 public:
  // options: max_sequences is the number of texts that have proposals at the same time; without an
  // archive. n_vocab: tokens of the larger model. Throws as Session().
  DraftModel(std::shared_ptr<Model> model, SessionOptions options, int32_t n_vocab);

  // Proposes for a text. Must not outlive this unless it is shared.
  std::shared_ptr<Drafter> drafter();

 private:
  friend class ModelDrafter;

  int32_t take();  // a sequence; -1: all are in use
  void give_back(int32_t sequence) noexcept;

  const int64_t process_ = process_id();  // a forked child may find mutex_ locked
  const int32_t n_vocab_;
  Session session_;
  std::mutex mutex_;           // guards free_: texts may end on any thread
  std::vector<int32_t> free_;  // sequences
};

}  // namespace h2o
