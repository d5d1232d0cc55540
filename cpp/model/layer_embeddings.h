// Embeddings of each token for each layer (Gemma 4's small models).
#pragma once

#include "backend/backend.h"
#include "model/activations.h"
#include "model/config.h"
#include "model/weights.h"

namespace h2o {

// a.layers.embd [n, n_layers * n_layer_embd]: the tokens' embeddings for all layers, from their own
// table and from the embedded rows a.x.
void embed_for_layers(Backend& b, const Config& c, const Weights& w, const Batch& batch,
                      const Activations& a);

// Adds the layer's part of a.layers.embd, gated by a.x, to a.x. Overwrites a.h.
void add_layer_embedding(Backend& b, const Config& c, const Layer& layer, int32_t l,
                         const Activations& a);

}  // namespace h2o
