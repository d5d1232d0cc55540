// The second block of a layer: an MLP, a mixture of experts, or both.
#pragma once

#include "backend/backend.h"
#include "model/activations.h"
#include "model/config.h"
#include "model/weights.h"

namespace h2o {

// y = x normalized in the family's way; y may be x.
void norm(Backend& b, const Config& c, const Tensor& y, const Tensor& x, const Affine& w);

// Adds a block's output projection, `from` times w, to the residual a.x. Overwrites a.h.
void add_block(Backend& b, const Config& c, const Activations& a, const Tensor& from,
               const Affine& w, const Affine& post_norm);

// Adds the block's output to the residual a.x; input: a.h, or a.x if it is not normalized.
void feed_forward(Backend& b, const Config& c, const Weights& w, int32_t l, const Activations& a,
                  const Tensor& input);

}  // namespace h2o
