// Backend::attend() and Backend::roll() on the device.
#pragma once

#include "vulkan/attention/step.h"
#include "vulkan/runtime/commands.h"

namespace h2o::vulkan {

void attend(Commands& commands, const Attention& attention, const KvView& cache,
            const DeviceBatch& device_batch, const Batch& batch);

// Backend::attend_whole()
void attend_whole(Commands& commands, const Attention& attention, int64_t head_dim,
                  const DeviceBatch& device_batch, const Batch& batch);

void roll(Commands& commands, const KvView& cache, const Rope& rope, int32_t sequence,
          int32_t length);

}  // namespace h2o::vulkan
