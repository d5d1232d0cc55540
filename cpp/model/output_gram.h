// What policies that weigh values by W_O need to know of it.
#pragma once

#include <span>

#include "core/buffer.h"
#include "kv/policy.h"
#include "model/model.h"

namespace h2o {

// KvShape::output_gram of a model for these policies, one or one for each layer: for each kv_head
// the sum of W^T W over the columns W [n_embd, head_dim] of W_O that belong to its query heads. If
// head h gives a token the probability p_h, its value v adds p_h W_h v to the output, so no more
// than (sum of p_h) sqrt(v^T G v) in all. Zeros for layers that do not weigh; an empty buffer if
// none does. The caller has the model to itself. Throws OutOfMemory.
Buffer compute_output_gram(Model& model, std::span<const KvPolicy> policies);

}  // namespace h2o
