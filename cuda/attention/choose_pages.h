// Selects the archived pages that each row attends to.
#pragma once

#include "cuda/runtime/device.h"

namespace h2o::cuda {

struct RecallStep;

// For each row and kv_head of the step: fills step.space.pages.
void choose_pages(const Stream& stream, const RecallStep& step);

}  // namespace h2o::cuda
