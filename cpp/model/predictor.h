// Multi-token prediction (arXiv 2412.19437, section 2.2): a layer behind the last one that predicts
// the token after the next, from the hidden state of a token and the embedding of the next one.
#pragma once

#include <memory>

#include "model/model.h"

namespace h2o {

// The first of a model's layers for multi-token prediction ({a}.nextn_predict_layers), as a model
// of one layer, which shares the other's back end, embeddings and output. A row of its batches is a
// token; Session::hidden() has the other model's hidden state of the token before, after its last
// norm. Throws FormatError; InvalidArgument if the file has none, or the family is not supported.
std::shared_ptr<Model> next_token_predictor(const std::shared_ptr<Model>& model);

}  // namespace h2o
