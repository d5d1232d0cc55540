// Batch: the rows of one forward pass, and which sequence each belongs to.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace h2o {

// Consecutive rows of one sequence: its next tokens, in order.
struct Segment {
  int32_t sequence;    // which sequence of the cache
  int32_t position;    // of its first row: the number of tokens that precede it in the sequence
  int32_t row;         // its first row in the batch
  int32_t n_rows;      // 1 when decoding, more when prefilling
  bool rolling;        // rotary positions are ranks among the kept tokens
  int32_t entry = -1;  // of the journal, if its row is a draft that may be retracted
};

class KvJournal;

// Rows of any number of sequences; some prefilling, some decoding.
//
// A batch has one or more turns. A sequence appears at most once in a turn. Turns change the cache
// one after another, as if each were a batch of its own: its rows see what earlier turns stored,
// scored and evicted. Later turns have one row per sequence, a draft that may be retracted:
// `journal` keeps what the drafts overwrite.
//
// In the first turn, a sequence may also have several consecutive segments, with the same effect;
// only the CPU supports that.
struct Batch {
  std::vector<int32_t> tokens;       // [n_rows]
  std::vector<int32_t> positions;    // [n_rows]
  std::vector<int32_t> logits_rows;  // rows whose logits are computed
  std::vector<float> temperatures;   // [logits_rows] for Backend::select_largest; 0: none
  std::vector<Segment> segments;     // turn by turn
  std::vector<int32_t> turns;        // the first segment of each turn but the first
  KvJournal* journal = nullptr;      // required by later turns

  int32_t n_turns() const { return static_cast<int32_t>(turns.size()) + 1; }
  std::span<const Segment> turn(int32_t i) const {
    const size_t begin = i == 0 ? 0 : turns[i - 1];
    const size_t end = i + 1 == n_turns() ? segments.size() : turns[i];
    return std::span(segments).subspan(begin, end - begin);
  }

  int32_t n_rows() const { return static_cast<int32_t>(tokens.size()); }

  void clear() {
    tokens.clear();
    positions.clear();
    logits_rows.clear();
    temperatures.clear();
    segments.clear();
    turns.clear();
  }

  void begin_turn() { turns.push_back(static_cast<int32_t>(segments.size())); }

  // Appends the next tokens of a sequence that has seen `position` tokens so far.
  void add(int32_t sequence, int32_t position, std::span<const int32_t> next, bool rolling = false,
           int32_t entry = -1) {
    segments.push_back(
        {sequence, position, n_rows(), static_cast<int32_t>(next.size()), rolling, entry});
    for (int32_t token : next) {
      tokens.push_back(token);
      positions.push_back(position++);
    }
  }

  // Requests the logits of the last row.
  void want_last() { logits_rows.push_back(n_rows() - 1); }
};

}  // namespace h2o
