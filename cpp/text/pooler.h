// Pooler: embeddings of texts, and scores of labels, from the hidden states of their tokens.
#pragma once

#include <span>

#include "model/session.h"
#include "text/step.h"
#include "text/tokenizer/tokenizer.h"

namespace h2o {

class Pooler {
 public:
  Pooler(Session& session, const Tokenizer& tokenizer) : session_(session), tokenizer_(tokenizer) {}

  // Computes those of whole texts with an encoder, the texts with the same pooling together, and
  // sorts them by that. An error ends the texts that it affects.
  void encode(std::span<StepRow> rows);

  // Accumulates the hidden states of a chunk, or keeps the last scores of labels. Throws as
  // Session::read_every_row().
  void read(const StepRow& row);

 private:
  Session& session_;
  const Tokenizer& tokenizer_;
};

}  // namespace h2o
