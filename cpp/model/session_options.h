// SessionOptions: the set-up of a session, and the shape of its cache.
#pragma once

#include <cstdint>
#include <vector>

#include "kv/archive.h"
#include "kv/policy.h"
#include "kv/shape.h"

namespace h2o {

struct Config;
struct Model;

// How the positions of a rotary model are computed.
enum class Positions {
  original,  // in the sequence, which ends at n_ctx
  rolling,   // ranks among the kept tokens: the output is unlimited
  automatic  // original up to the trained length, then rolling if the policy evicts
};

// Default n_ctx if the model was trained on longer contexts: the full cache grows with it, and hh
// is a fraction of it.
constexpr int32_t kDefaultContext = 4096;

constexpr int32_t kMaxDrafts = 1024;  // the limit of SessionOptions::max_drafts

struct SessionOptions {
  std::vector<KvPolicy> policies;  // one, or one per layer; none = full cache
  int32_t n_ctx = 0;               // maximum length of a sequence unless it rolls; 0 = as trained
  int32_t n_batch = 0;             // maximum rows of a forward pass; 0 = Capabilities::n_batch
  int32_t n_sequences = 1;         // allocated when the session is created
  int32_t max_sequences = 0;       // limit of reserve_sequences(); 0 = n_sequences
  DType k_dtype = DType::f16;      // of the cached keys
  DType v_dtype = DType::f16;      // and values
  Positions positions = Positions::automatic;
  // Archive of evicted tokens. Sequences then end at n_ctx, with original positions.
  ArchiveOptions archive = {};
  // The share of KV heads that have an archive, see retrieval_heads(); 1: archive.heads.
  double archive_heads = 1;
  int32_t max_drafts = 0;  // rows of a forward pass that may be drafts, see Input
};

// The usual max_drafts: 16, or 4 with recurrent layers, whose states each draft copies.
int32_t default_drafts(const Config& config);

// options.n_batch, or if that is 0, the back end's.
int32_t batch_rows(const Model& model, const SessionOptions& options);

// The options with defaults replaced by the model's: a policy per layer, n_ctx, n_batch,
// max_sequences, the heads that have an archive. Throws InvalidArgument.
SessionOptions resolve(const Model& model, SessionOptions options);

// The shape of the cache that resolved options ask for, except output_gram. Throws InvalidArgument
// if positions cannot roll.
KvShape cache_shape(const Model& model, const SessionOptions& options);

}  // namespace h2o
