// Drafts: what they overwrite is copied to the journal, and back.
#pragma once

#include <cstdint>
#include <span>

#include "backend/batch.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"
#include "kv/journal.h"
#include "kv/view.h"

namespace h2o {

// Copies what a draft will overwrite in one kv_head of a layer, or its recurrent state. `archives`:
// the token that it evicts will be archived.
void record_draft(const KvView& layer, const KvUndo& undo, const Segment& draft, int32_t kv_head,
                  bool archives);
void record_state(const KvView& layer, const KvUndo& undo, const Segment& draft);

// Backend::retract
void retract(const CpuKernels& kernels, ThreadPool& pool, std::span<const KvView> layers,
             const KvJournal& journal, const Retraction& drafts);

}  // namespace h2o
