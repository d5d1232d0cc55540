// Generation: the state of one request in the engine: its tokens, its text, its finish reason.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "text/detokenizer.h"
#include "text/mailbox.h"
#include "text/prefix_planner.h"
#include "text/request.h"

namespace h2o {

enum class Finish : uint8_t {
  none,
  stop,      // an end-of-generation token, or a stop string
  length,    // max_tokens, or the end of the context
  cancelled  // or failed
};

// Text completed by one or more steps: complete characters, never empty.
struct Piece {
  std::string text;
  int32_t n_tokens;  // tokens generated when it was completed
};

// Input tokens of a generation that no KV head keeps.
struct Forgotten {
  int32_t n_evicted = 0;
  int32_t n_archived = 0;  // of these, in an archive, which may recall them
  // Says for each input token whether some KV head keeps it: 1 or 0; null: nothing was evicted.
  std::shared_ptr<const std::vector<char>> kept = nullptr;
};

// Statistics of a generation. Tokens after the first count as decoding.
struct Progress {
  Finish finish = Finish::none;
  std::string finish_message = {};  // why the context ended, or ""
  std::string stop_string = {};     // that ended the text, or ""
  int32_t n_prompt = 0;             // tokens read before the first was generated
  int32_t n_cached = 0;             // tokens before those that were found in a cache
  int32_t n_read = 0;               // of the n_prompt tokens, those read so far
  int32_t n_generated = 0;
  int32_t n_drafted = 0;     // tokens proposed by a drafter,
  int32_t n_accepted = 0;    // of which these were right
  Forgotten forgotten = {};  // at the end
  double prompt_seconds = 0;
  double decode_seconds = 0;
};

// Shared by an engine and its generations.
struct EngineMonitor {
  std::mutex mutex;
  std::condition_variable changed;  // pieces, ends, admissions, or no thread is computing
};

// Created by Engine::submit(). Thread-safe for reading.
class Generation {
 public:
  Generation(std::shared_ptr<EngineMonitor> monitor, Request request);

  const Request& request() const { return request_; }

  Progress progress() const;
  std::vector<int32_t> tokens() const;            // snapshot, prompt and generated tokens
  std::vector<int32_t> generated_tokens() const;  // the generated tokens only
  int32_t n_tokens() const;
  std::string text() const;       // everything generated
  std::string text_read() const;  // the part already returned
  int32_t n_tokens_read() const;  // tokens of the part already returned
  bool began() const;             // has any token been processed?
  bool admitted() const;          // false while the queue is full
  bool has_ended() const;

  // These may be called only after the end. logits(): the logits after its last token [n_vocab], if
  // it has allow_logits and all its tokens have been processed, else empty. held_back(): the text
  // held back when it was cancelled.
  std::span<const float> logits() const { return logits_; }
  std::string held_back() const { return Detokenizer(detokenizer_).finish(); }

  // The embedding that request().pooling selects [n_embd], or the scores [n_labels]; before
  // the end, and if cancelled, empty.
  std::vector<float> embedding() const;

 private:
  friend class AdmissionQueue;
  friend class Engine;
  friend class Pooler;
  friend class RowSampler;
  friend class Scheduler;
  friend class StepRunner;
  friend struct StepOutput;

  // Posts to its mailbox, if it has one. Without memory, only the notification is lost.
  static void notify(const std::shared_ptr<Generation>& generation) noexcept;

  // Members below are guarded by the monitor's mutex, except those of the computing thread.
  bool ended() const { return progress_.finish != Finish::none; }
  bool wanted() const { return request_.eager || n_waiting_ > 0; }
  bool reads_prompt() const { return tokens_.size() == n_input_tokens_; }
  Piece take_piece();
  Piece take_all();

  const std::shared_ptr<EngineMonitor> monitor_;
  Request request_;

  std::vector<int32_t> tokens_;
  size_t n_input_tokens_ = 0;  // snapshot and prompt
  size_t max_new_tokens_ = 0;  // maximum number of tokens to generate
  Progress progress_;
  std::exception_ptr error_;  // rethrown once, to the thread that waits for pieces
  std::string text_;
  size_t text_read_ = 0;
  struct End {
    size_t text;
    int32_t n_tokens;
  };
  std::deque<End> pieces_;  // ends in text_ of pieces not yet returned
  int32_t n_tokens_read_ = 0;
  bool began_ = false, admitted_ = true, submitted_ = false;
  bool cancelled_ = false;  // while a thread computes: ends after that step
  int32_t n_waiting_ = 0;   // threads waiting for a piece
  std::thread::id reader_;  // last thread that waited for it
  std::chrono::steady_clock::time_point last_read_at_{};  // when it last received a piece
  std::weak_ptr<Mailbox> mailbox_;  // notified about pieces, admission and end
  // The next in a list of ended generations whose callbacks are to be released.
  std::shared_ptr<Generation> ended_before_;

  // Accessed by the computing thread only.
  std::shared_ptr<Sampler> sampler_;
  std::string random_state_;  // from the snapshot
  Detokenizer detokenizer_;
  PrefixPlan prefixes_;            // which of its states are cached
  std::vector<int32_t> drafted_;   // in this step: the next token, then drafts
  bool begins_ = true;             // no text yet: a leading space is not part of it
  int32_t sequence_ = -1;          // current or, after the end, last sequence; -1: none
  std::vector<std::byte> parked_;  // saved sequence, while another generation uses its slot
  int32_t n_evicted_ = 0;
  bool awaits_mask_ = false;           // its next token was not sampled, as the mask is not known
  std::span<const uint32_t> allowed_;  // mask of allowed tokens for this step; empty: all
  std::vector<float> logits_;          // after the last token; may be empty
  std::vector<double> pooled_;         // hidden states: their sum, or the last one
};

}  // namespace h2o
