// The Gram matrices of W_O, for policies that weigh values by outputs.
#pragma once

#include <span>

#include "core/buffer.h"
#include "kv/policy.h"
#include "model/model.h"

namespace h2o {

// Computes KvShape::output_gram of a model for these policies, one or one per layer: for each
// kv_head the sum of W^T W over its query heads, where W [n_embd, head_dim] are the columns of W_O
// of one head. If head h gives a token probability p_h, its value v adds p_h W_h v to the output,
// so at most (sum of p_h) sqrt(v^T G v) in total. Zeros for layers that do not weigh by outputs; an
// empty buffer if none does. The caller must hold the model's lock. Throws OutOfMemory.
Buffer compute_output_gram(Model& model, std::span<const KvPolicy> policies);

}  // namespace h2o
