// Snapshots: a sequence and its text as bytes, to keep in memory or in a file.
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
//   cache                           kv/sequence_image
//
// Version 2 had JSON for a note, {"random_state": ..., "note": ...}, and nothing held; it is read
// too. Other versions are refused: a snapshot is not an archive, its text can be read again.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/bytes.h"
#include "io/gguf_shards.h"

namespace h2o {

inline constexpr uint32_t kSnapshotVersion = 3;

// What a snapshot holds besides the cache.
struct SnapshotText {
  std::vector<int32_t> tokens;     // of the text so far
  std::string note;                // JSON that the caller wants to find again; "" = null
  int32_t n_read = 0;              // tokens that the cache has seen; the others are still to be fed
  std::vector<float> logits = {};  // [n_vocab] after the last token, if all are read; or none
  std::string random_state = {};   // of the sampler; "" = none
  std::string held_text = {};      // of the tokens, not given out: it may begin a stop string
  std::string held_bytes = {};     // of the tokens after that: of a character that is not complete
};

// Tells models apart: by their metadata but for general.*, by the names, shapes and types of their
// tensors and by a sample of the data.
uint64_t fingerprint(const GgufShards& model);

// Begins a snapshot, and completes it when the cache has been appended.
ByteWriter begin_snapshot(uint64_t model, const SnapshotText& text, uint8_t positions);
std::vector<std::byte> end_snapshot(ByteWriter writer);

struct OpenSnapshot {
  uint64_t model;
  SnapshotText text;
  uint8_t positions;
  ByteReader cache;
};

enum class Damage : bool { none, possible };

// Throws FormatError for bytes that are no snapshot, or have been damaged, where that is possible.
// They must outlive it.
OpenSnapshot open_snapshot(std::span<const std::byte> bytes, Damage damage = Damage::possible);

}  // namespace h2o
