// One forward pass of a transformer: a decoder with its cache, or an encoder, which has none.
#pragma once

#include "backend/backend.h"
#include "kv/cache.h"
#include "model/activations.h"
#include "model/config.h"
#include "model/weights.h"

namespace h2o {

// Runs all rows of the batch through all layers; leaves the residual stream in buffers.x and the
// rows' keys and values in the cache.
void forward(Backend& b, const Config& c, const Weights& w, const Batch& batch,
             const KvCache& cache, const Activations& buffers);

// buffers.last[i] = hidden state of row batch.logits_rows[i] after the final norm;
// buffers.dense_3[i] = its projections, if the model has them. Call after forward() of the same
// batch.
void read_hidden(Backend& b, const Config& c, const Weights& w, const Batch& batch,
                 const Activations& buffers);

// buffers.labels[i] = the scores of the model's labels by that state.
void score_labels(Backend& b, const Config& c, const Weights& w, const Batch& batch,
                  const Activations& buffers);

// buffers.logits[i] = logits of row batch.logits_rows[i]. Call after forward() of the same batch.
void unembed(Backend& b, const Config& c, const Weights& w, const Batch& batch,
             const Activations& buffers);

}  // namespace h2o
