// Session: sequences of one model with their bounded cache. The stateful thing a user holds.
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
#include "model/snapshot.h"

namespace h2o {

// Where the tokens of a rotary model are, as far as attention sees it.
enum class Positions {
  original,  // where they are in the text, which ends at n_ctx
  rolling,   // their ranks among what the cache keeps: the output has no limit
  automatic  // original up to the trained length, then rolling, if the policy evicts
};

// What a context is where none is asked for and the model is trained for more: the cache of a full
// context grows with it, and hh is a fraction of it.
constexpr int32_t kDefaultContext = 4096;

struct SessionOptions {
  std::vector<KvPolicy> policies;  // one, or one for each layer; none = full cache
  int32_t n_ctx = 0;      // the most tokens a sequence can have unless it can roll; 0 = as trained
  int32_t n_batch = 512;  // the most rows of one forward pass
  int32_t n_sequences = 1;     // caches that are allocated when it is opened
  int32_t max_sequences = 0;   // that reserve_sequences() may raise n_sequences to; 0 = n_sequences
  DType k_dtype = DType::f16;  // of the cached keys
  DType v_dtype = DType::f16;  // and values
  Positions positions = Positions::automatic;
  // What is evicted stays there, and a text ends at n_ctx: positions are then original.
  ArchiveOptions archive = {};
};

// The next tokens of one sequence.
struct Input {
  int32_t sequence;
  std::span<const int32_t> tokens;
};

class Session {
 public:
  // Allocates cache and activations. Throws InvalidArgument, OutOfMemory.
  Session(std::shared_ptr<Model> model, const SessionOptions& options);

  // One forward pass: appends the tokens to their sequences, each named at most once, at most
  // n_batch tokens together and chunk() of each. Every token attends to what was kept before and to
  // those before it; eviction comes after. Returns the logits [n_inputs, n_vocab] that follow each
  // input's last token, valid until the next call. On InvalidArgument nothing has changed.
  std::span<const float> step(std::span<const Input> inputs);

  // step(), of whose logits only the most likely tokens [n_inputs] are wanted.
  std::span<const int32_t> greedy(std::span<const Input> inputs);

  // step(), of whose logits the largest [n_inputs] are wanted, and how much the others weigh at
  // temperatures [n_inputs], 0 where that does not matter. Only if it selects().
  bool selects() const { return model_->backend->selects_largest(); }
  std::span<const LargestLogits> select(std::span<const Input> inputs,
                                        std::span<const float> temperatures);

  // After select(): the logits [n_vocab] of its i-th input, valid until the next call of another
  // member.
  std::span<const float> selected_row(size_t i);

  // step() of a single sequence, giving something of every token: sink(i, values of token i), which
  // must not use the model. score(): the logits after it [n_vocab]; hidden(): its hidden state
  // after the last norm [n_embd].
  using Sink = std::function<void(int32_t i, std::span<const float> values)>;
  void score(const Input& input, const Sink& sink);
  void hidden(const Input& input, const Sink& sink);

  // Allocates caches until there are `n` sequences, at most max_sequences. Those that are there go
  // on as before. Throws OutOfMemory, and has then changed nothing.
  void reserve_sequences(int32_t n);

  // Calls body(i) for each i below n on the model's threads and waits; `body` must not throw.
  void parallel_for(int64_t n, const std::function<void(int64_t i)>& body);

  // Forgets a sequence's tokens; it goes on with `policies`, if there are any, as
  // KvCache::reset has it.
  void reset(int32_t sequence, std::span<const KvPolicy> policies = {});

  // A sequence as bytes, with its text; and back, after which everything goes on as it would have
  // there, bit for bit. load() throws FormatError, and has then changed nothing, for bytes that are
  // damaged, or of another model, policy or cache type.
  // `n_read` of the text is the session's own to say. save() throws InvalidArgument if the text has
  // fewer tokens than were read. The logits are the caller's to keep: they are not the session's.
  std::vector<std::byte> save(int32_t sequence, SnapshotText text) const;
  SnapshotText load(int32_t sequence, std::span<const std::byte> snapshot);

  // Does the state of a sequence depend on its tokens alone, bit for bit, whatever steps read them?
  // It does where nothing is scored and nothing is ever evicted.
  bool is_plain(int32_t sequence) const;

  // Loads the first n tokens of a plain state that save() wrote here, which is not damaged. Throws
  // FormatError, as load() does.
  void load_plain(int32_t sequence, std::span<const std::byte> snapshot, int32_t n_tokens);

  // How many more tokens a sequence can take, and how many of them the next step can. A step ends
  // at the trained length, where a sequence begins to roll.
  int32_t room(int32_t sequence) const;
  int32_t chunk(int32_t sequence) const;

  // Can a sequence go on past the trained length, with rolling positions; and does it now?
  bool can_roll(int32_t sequence) const;
  bool rolling(int32_t sequence) const;

  // Tokens a sequence has seen, how many of them are kept (per layer and kv_head; without a layer:
  // in the one that keeps most), and which. These wait for a step that another thread is at.
  int32_t tokens_seen(int32_t sequence) const;
  int32_t tokens_kept(int32_t sequence) const;
  int32_t tokens_kept(int32_t sequence, int32_t layer) const;
  std::vector<KvEntry> entries(int32_t layer, int32_t sequence, int32_t kv_head) const;

  const Model& model() const { return *model_; }
  const SessionOptions& options() const { return options_; }
  const KvShape& cache_shape() const { return cache_.shape(); }
  size_t cache_bytes() const { return cache_.bytes(); }
  size_t archive_bytes() const;     // of what has been evicted, where there is an archive
  size_t full_cache_bytes() const;  // what a cache of all n_ctx tokens would take

 private:
  // No other thread may use the back end meanwhile.
  Session(const std::shared_ptr<Model>& model, const SessionOptions& options,
          const std::lock_guard<std::mutex>& lock);

  void start(int32_t sequence);                 // which is empty
  void roll_on(std::span<const Input> inputs);  // those that have reached the trained length
  Positions positions_of(int32_t sequence) const;
  SnapshotText load(int32_t sequence, OpenSnapshot open, std::optional<int32_t> n_tokens);
  int32_t room_unlocked(int32_t sequence) const;
  int32_t chunk_unlocked(int32_t sequence) const;
  void check(std::span<const Input> inputs) const;
  void fill_batch(std::span<const Input> inputs);
  void read_every_row(const Input& input, bool logits, const Sink& sink);
  void compute_logits(std::span<const Input> inputs, std::span<const float> temperatures,
                      std::unique_ptr<CapturedGraph>& graph, const std::function<void()>& then);

  std::shared_ptr<Model> model_;
  SessionOptions options_;
  Buffer output_gram_;  // of the cache
  KvCache cache_;
  Buffer storage_;
  Activations activations_;
  Batch batch_;
  Buffer picks_;                           // [n_logits] of greedy(), where the model is computed
  Buffer largest_;                         // [n_logits] of select(), likewise
  Buffer logits_;                          // [n_logits, n_vocab or n_embd] on the host
  Buffer largest_read_;                    // [n_logits] likewise
  std::vector<int32_t> picks_read_;        // [n_logits]
  std::unique_ptr<CapturedGraph> steps_;   // of step()
  std::unique_ptr<CapturedGraph> greedy_;  // of greedy()
  std::unique_ptr<CapturedGraph> select_;  // of select()
};

}  // namespace h2o
