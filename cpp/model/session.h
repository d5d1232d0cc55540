// Session: sequences of one model with their bounded KV cache.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "kv/cache.h"
#include "model/activations.h"
#include "model/model.h"
#include "model/session_options.h"
#include "model/snapshot.h"

namespace h2o {

// The next tokens of one sequence.
struct Input {
  int32_t sequence;
  std::span<const int32_t> tokens;
  int32_t n_drafts = 0;  // the last of them that may be retracted after the step; not all of them
  bool one_by_one = false;  // evict after each, as when they were generated; requires replays()
  // Where its second part begins, whose tokens are of the second type: encode() only.
  size_t second_part = SIZE_MAX;
  // The step has this single token, which may be retracted, as may those that were ahead in the
  // steps right before; max_drafts at most.
  bool ahead = false;

  size_t n_logits() const { return 1 + static_cast<size_t>(n_drafts); }
};

class Session {
 public:
  // Allocates cache and activations. Throws InvalidArgument, OutOfMemory.
  Session(std::shared_ptr<Model> model, const SessionOptions& options);

  // One forward pass: appends tokens to their sequences, each of which may appear once; at most
  // n_batch tokens in total and chunk() per sequence. Each token attends to the kept tokens and to
  // the input tokens before it; eviction follows. Returns the logits [n_inputs, n_vocab] after each
  // input's last token, valid until the next call. Throws InvalidArgument without changing
  // anything.
  //
  // Drafts are read as if each had a step of its own, bit for bit: eviction follows each of them.
  // An input then has n_drafts + 1 rows of logits: one before each draft and one after the last.
  std::span<const float> step(std::span<const Input> inputs);

  // Removes the last `n` drafts of a sequence's last step, which no other step has followed, or
  // tokens that were ahead. The sequence is, bit for bit, as if it had never read them.
  void retract(int32_t sequence, int32_t n);

  // Replaces a sequence by what its policy keeps of all that a plain sequence of `full`, a session
  // of the same model and types, has read: sinks, recent tokens, and those to which its last tokens
  // attend most (after SnapKV, arXiv 2404.14469). It reads these, `last`, again, in one pass, which
  // leaves `full` the same, bit for bit. At most kMostObserved tokens. Requires original positions,
  // no archive, and a back end with drafts. Throws InvalidArgument, OutOfMemory without changing
  // anything.
  static constexpr int32_t kMostObserved = 16;
  void fill(int32_t sequence, const Session& full, int32_t from, std::span<const int32_t> last);

  // Like step(), but returns only the most likely tokens: [n_inputs], with drafts one per row.
  std::span<const int32_t> greedy(std::span<const Input> inputs);

  // Like step(), but returns only the largest logits [n_inputs], and the weight of all others at
  // temperatures [n_inputs] (0: not needed). Requires selects(); the inputs have no drafts.
  bool selects() const { return model_->backend->capabilities().largest_logits; }
  std::span<const LargestLogits> select(std::span<const Input> inputs,
                                        std::span<const float> temperatures);

  // The logits [n_vocab] of select()'s i-th input, valid until the next call of another
  // member function.
  std::span<const float> selected_row(size_t i);

  // The logits after a token [n_vocab], its hidden state after the final norm [n_embd], or the
  // scores of the model's labels by that state [n_labels].
  enum class Values { logits, hidden, labels };

  // step() of a single sequence that calls sink(i, values of token i) for every token; `sink` must
  // not use the model.
  using Sink = std::function<void(int32_t i, std::span<const float> values)>;
  void read_every_row(const Input& input, Values wanted, const Sink& sink);
  void score(const Input& input, const Sink& sink) { read_every_row(input, Values::logits, sink); }

  // One forward pass of an encoder: each token attends to its whole text. Calls sink(i, values) for
  // the first token of text i, its last, or all of them in order. Nothing is kept of the texts,
  // which are limited as the inputs of step(). Throws InvalidArgument for another model.
  enum class Tokens { first, last, all };
  void encode(std::span<const Input> texts, Values wanted, Tokens tokens, const Sink& sink);

  // Grows to `n` sequences, at most max_sequences; existing ones are kept. Throws OutOfMemory
  // without changing anything.
  void reserve_sequences(int32_t n);

  // Appends the hidden states of a sequence's tokens in the last step, after the last norm
  // [n, n_embd], in order. Must not be called between select() and selected_row().
  void read_hidden_states(int32_t sequence, std::vector<float>& to);

  // Returns that of the last step's first logits [n_embd], valid until the next.
  std::span<const float> last_hidden();

  // Sets the other model's hidden states for the next step, whose n rows are those of one sequence
  // [n, n_embd]. Requires Config::predicts. Throws InvalidArgument, as a step with other rows does.
  void set_hidden(std::span<const float> states);

  // Can a step read tokens one by one, with the same results, bit for bit, as a step for each?
  bool replays() const;

  // Calls body(i) for each i < n on the model's threads and waits; `body` must not throw.
  void parallel_for(int64_t n, const std::function<void(int64_t i)>& body);

  // Clears a sequence; `policies`, if any, replace its policies as in KvCache::reset().
  void reset(int32_t sequence, std::span<const KvPolicy> policies = {});

  // Copies a sequence over another one, which then continues bit for bit as the first. Requires a
  // session without an archive.
  void copy(int32_t from, int32_t to);

  // Saves a sequence and its state as bytes, and restores it, after which it continues bit for bit
  // as the original. load() throws FormatError, without changing anything, for damaged bytes or
  // another model, policy or cache type.
  // `text.n_read` is set by save(), which throws InvalidArgument if the text has fewer tokens than
  // were processed. Logits are not part of the session's state; the caller keeps them.
  std::vector<std::byte> save(int32_t sequence, SnapshotText text) const;
  SnapshotText load(int32_t sequence, std::span<const std::byte> snapshot);

  // True if the sequence's state depends, bit for bit, only on its tokens and not on how they were
  // divided into steps: there are no scores and nothing is ever evicted.
  bool is_plain(int32_t sequence) const;

  // Loads the first n tokens of an undamaged snapshot that save() wrote for a plain state of this
  // session. Throws FormatError, as load() does.
  void load_plain(int32_t sequence, std::span<const std::byte> snapshot, int32_t n_tokens);

  // How many more tokens a sequence can take, and how many of them the next step can. A step ends
  // at the trained length, where a sequence starts rolling.
  int32_t room(int32_t sequence) const;
  int32_t chunk(int32_t sequence) const;

  // Can the sequence continue past the trained length with rolling positions, and is it rolling
  // now?
  bool can_roll(int32_t sequence) const;
  bool rolling(int32_t sequence) const;

  // Tokens that a sequence has seen, how many are kept (per layer and kv_head; without a layer: the
  // maximum over layers), and which. These calls block during a step on another thread.
  int32_t tokens_seen(int32_t sequence) const;
  int32_t tokens_kept(int32_t sequence) const;
  int32_t tokens_kept(int32_t sequence, int32_t layer) const;
  std::vector<KvEntry> entries(int32_t layer, int32_t sequence, int32_t kv_head) const;
  std::vector<char> kept_anywhere(int32_t sequence) const;  // see KvCache

  const Model& model() const { return *model_; }
  const SessionOptions& options() const { return options_; }
  const KvShape& cache_shape() const { return cache_.shape(); }
  // These block during a step on another thread.
  size_t cache_bytes() const;                                    // with what fill() needs
  const KvArchive* archive() const { return cache_.archive(); }  // nullptr if there is none
  size_t archive_bytes() const;     // of evicted tokens, if there is an archive
  size_t full_cache_bytes() const;  // size of a cache for all n_ctx tokens
  // Stored numbers that the cache's types clamped, as Backend::n_clamped(), with those of tokens
  // that were retracted.
  int64_t n_clamped() const;

 private:
  // No other thread may use the back end at the same time.
  Session(const std::shared_ptr<Model>& model, const SessionOptions& options,
          const std::lock_guard<std::mutex>& lock);

  void start(int32_t sequence);  // an empty sequence
  Positions positions_of(int32_t sequence) const;
  SnapshotText load(int32_t sequence, OpenSnapshot open, std::optional<int32_t> n_tokens);
  bool is_plain_unlocked(int32_t sequence) const;
  int32_t room_unlocked(int32_t sequence) const;
  int32_t chunk_unlocked(int32_t sequence) const;
  void check(std::span<const Input> inputs) const;
  void check_decodes() const;
  void prepare(std::span<const Input> inputs);
  void advance();
  void place_token_types(std::span<const Input> texts);
  template <class Read, class Use>
  void for_rows(std::span<const int32_t> rows, const Read& read, const Use& use);
  void read_rows(std::span<const int32_t> rows, Values wanted, const Sink& sink);
  bool is_to_roll(int32_t sequence) const;
  void prepare_ahead(const Input& input);
  void compute_logits(std::span<const Input> inputs, std::span<const float> temperatures,
                      std::unique_ptr<CapturedGraph>& graph, const std::function<void()>& then);

  std::shared_ptr<Model> model_;
  SessionOptions options_;
  Buffer output_gram_;  // see KvShape
  KvCache cache_;
  std::optional<KvCache> observer_;  // of a full sequence, for fill()
  Buffer storage_;
  Activations activations_;
  Batch batch_;
  int64_t n_hidden_ = 0;                   // rows of set_hidden() that no step has read
  int32_t n_ahead_ = 0;                    // tokens that may be retracted
  int64_t n_clamped_ = 0;                  // in all passes
  int64_t n_clamped_before_ = 0;           // the back end's, before the current pass
  Buffer picks_;                           // [n_logits] of greedy(), on the back end
  Buffer largest_;                         // [n_logits] of select(), on the back end
  Buffer logits_;                          // [n_logits, the largest of Values] on the host
  Buffer largest_read_;                    // [n_logits], on the host
  std::vector<int32_t> picks_read_;        // [n_logits]
  std::vector<float> hidden_read_;         // [n_embd]
  std::unique_ptr<CapturedGraph> steps_;   // of step()
  std::unique_ptr<CapturedGraph> greedy_;  // of greedy()
  std::unique_ptr<CapturedGraph> select_;  // of select()
};

}  // namespace h2o
