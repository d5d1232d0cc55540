// Snapshots: a sequence and its state as bytes, kept in memory or in a file.
//
//   "h2o snap"                      8 bytes
//   version                         u32, kSnapshotVersion
//   size and checksum of the rest   u64, u64
//   model                           u64, fingerprint()
//   text: tokens, note, n_read      u64 count, i32 each; u64 length, bytes; i32
//   logits                          u64 count, f32 each; or none
//   random state                    u64 length, text of Sampler::random_state(); or none
//   held text, held bytes           u64 length, bytes; each
//   positions                       u8, of the session
//   cache                           kv/serialized_sequence
//
// Version 2 stores {"random_state": ..., "note": ...} as a JSON note and nothing held back; it can
// be read too. Other versions are rejected: the tokens can be processed again.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/bytes.h"
#include "io/gguf_shards.h"

namespace h2o {

inline constexpr uint32_t kSnapshotVersion = 3;

// The part of a snapshot besides the cache.
struct SnapshotText {
  std::vector<int32_t> tokens;  // of the sequence so far
  std::string note;             // JSON for the caller; "" = null
  int32_t n_read = 0;           // tokens in the cache; the others are still to be processed
  // [n_vocab] after the last token, if all tokens are in the cache; otherwise empty
  std::vector<float> logits = {};
  std::string random_state = {};  // of the sampler; "" = none
  std::string held_text = {};     // text not yet returned, because it may begin a stop string
  std::string held_bytes = {};    // bytes after that, of an incomplete character
};

// Identifies a model by its metadata (except general.*), the names, shapes and types of its
// tensors, and a sample of their data.
uint64_t fingerprint(const GgufShards& model);

// Starts a snapshot; end_snapshot() completes it after the cache has been appended.
ByteWriter begin_snapshot(uint64_t model, const SnapshotText& text, uint8_t positions);
std::vector<std::byte> end_snapshot(ByteWriter writer);

struct OpenSnapshot {
  uint64_t model;
  SnapshotText text;
  uint8_t positions;
  ByteReader cache;
};

enum class Damage : bool { none, possible };

// Throws FormatError if the bytes are not a snapshot or, with Damage::possible, if they are
// damaged. The bytes must outlive the result.
OpenSnapshot open_snapshot(std::span<const std::byte> bytes, Damage damage = Damage::possible);

// Throws FormatError unless the snapshot was saved for the model of this fingerprint.
void check_model(const OpenSnapshot& snapshot, uint64_t fingerprint, int32_t n_vocab);

}  // namespace h2o
