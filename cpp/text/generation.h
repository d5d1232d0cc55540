// Generation: the state of one request in the engine: its tokens, its text, why it ended.
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
#include "text/request.h"

namespace h2o {

enum class Finish : uint8_t {
  none,
  stop,      // the end of the text, or a stop string
  length,    // max_tokens, or the end of the context
  cancelled  // or failed
};

// Text that one step, or several, have completed: whole characters, never empty.
struct Piece {
  std::string text;
  int32_t n_tokens;  // that were generated when it was complete
};

// Numbers of a generation. Tokens after the first count as decoding.
struct Progress {
  Finish finish = Finish::none;
  std::string finish_message = {};  // why the context ended, or ""
  int32_t n_prompt = 0;             // tokens read before the first was generated
  int32_t n_cached = 0;             // tokens before them that did not have to be read again
  int32_t n_generated = 0;
  double prompt_seconds = 0;
  double decode_seconds = 0;
};

// What an engine and its generations share.
struct EngineMonitor {
  std::mutex mutex;
  std::condition_variable changed;  // there are pieces, ends, admissions, or nobody computes
};

// Made by Engine::submit(). Any thread may read it at any time.
class Generation {
 public:
  Generation(std::shared_ptr<EngineMonitor> monitor, Request request);

  const Request& request() const { return request_; }

  Progress progress() const;
  std::vector<int32_t> tokens() const;            // of the snapshot, of the prompt, and generated
  std::vector<int32_t> generated_tokens() const;  // the last of them
  int32_t n_tokens() const;
  std::string text() const;       // all that has been generated
  std::string text_read() const;  // what has been taken of it
  int32_t n_tokens_read() const;  // generated tokens of the text that has been taken
  bool began() const;             // has anything been read?
  bool admitted() const;          // false while the queue is full
  bool has_ended() const;

  // Only after it has ended: the logits after its last token [n_vocab], if it keeps_logits and all
  // its tokens have been read, else none; and the text that was held back when it was cancelled.
  std::span<const float> logits() const { return logits_; }
  std::string held_back() const { return Detokenizer(detokenizer_).finish(); }

  // Only after it has ended: what request().pooling says [n_embd].
  std::vector<float> embedding() const;

 private:
  friend class Engine;
  friend class Scheduler;

  // All below are guarded by the monitor's mutex, but for those of the thread that computes.
  bool ended() const { return progress_.finish != Finish::none; }
  bool wanted() const { return request_.eager || n_waiting_ > 0; }
  bool reads_prompt() const { return tokens_.size() == n_given_; }
  Piece take_piece();
  Piece take_all();

  const std::shared_ptr<EngineMonitor> monitor_;
  Request request_;

  std::vector<int32_t> tokens_;
  size_t n_given_ = 0;  // tokens of the snapshot and of the prompt
  size_t n_most_ = 0;   // tokens to generate
  Progress progress_;
  std::exception_ptr error_;  // thrown where its pieces are waited for, once
  std::string text_;
  size_t text_read_ = 0;
  struct End {
    size_t text;
    int32_t n_tokens;
  };
  std::deque<End> pieces_;  // where those not taken end in text_
  int32_t n_tokens_read_ = 0;
  bool began_ = false, admitted_ = true, submitted_ = false;
  bool cancelled_ = false;                           // while a thread computes: it ends after that
  int32_t n_waiting_ = 0;                            // threads that wait for a piece
  std::thread::id reader_;                           // who waited for it last
  std::chrono::steady_clock::time_point left_at_{};  // and when it was given one
  std::weak_ptr<Mailbox> mailbox_;                   // which holds the generations that have news

  // Of the thread that computes.
  std::shared_ptr<Sampler> sampler_;
  std::string random_state_;  // of the snapshot
  Detokenizer detokenizer_;
  bool from_beginning_ = true;     // its state is that of its tokens, read from the first
  bool saves_whole_ = false;       // the state at the end of its prompt is wanted by others
  std::vector<size_t> save_at_;    // after how many tokens its state is to be kept
  bool begins_ = true;             // no text yet: a space in front does not count
  int32_t sequence_ = -1;          // that holds it, also when it has ended; -1: none
  std::vector<std::byte> parked_;  // its sequence, while another generation uses that
  int32_t n_evicted_ = 0;
  std::span<const uint32_t> allowed_;  // tokens, in this step; empty: all
  std::vector<float> logits_;          // after the last token; or none
  std::vector<double> pooled_;         // hidden states: their sum, or the last one
};

}  // namespace h2o
