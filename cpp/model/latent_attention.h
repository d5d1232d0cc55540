// Multi-head latent attention: the heads of a layer, in the form that reads latent vectors.
#pragma once

#include "backend/backend.h"
#include "model/activations.h"
#include "model/config.h"
#include "model/weights.h"

namespace h2o {

// a.q [n, n_heads * head_dim] and a.k [n, head_dim]: the queries and keys of the block's input x,
// of which attend() rotates the first dimensions.
void latent_queries(Backend& b, const Config& c, const Layer& layer, const Activations& a,
                    const Tensor& x);

// a.latent.out [n, n_heads * v_dim]: the heads' outputs, from a.attn [n, n_heads * head_dim], whose
// latent part is weighted by attention.
void latent_values(Backend& b, const Config& c, const Layer& layer, const Activations& a);

}  // namespace h2o
