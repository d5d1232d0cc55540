// Drafts: after reading and retracting them a session is, bit for bit, where plain decoding is.
#include <doctest/doctest.h>

#include "core/error.h"
#include "engine_rig.h"
#include "text/draft_cost.h"
#include "text/draft_pace.h"

namespace h2o {
namespace {

// At most as large as kLargest.
KvPolicy random_policy(Random& random) {
  KvPolicy policy{
      .sinks = random.integer(0, 3), .heavy = random.integer(0, 6), .recent = random.integer(1, 6)};
  const Scoring scorings[] = {Scoring::sum, Scoring::mean, Scoring::inverse, Scoring::question,
                              Scoring::random};
  policy.scoring = scorings[random.integer(0, 4)];
  if (random.flip()) policy.decay = 0.9f;
  if (random.flip()) policy.value_norm = random.flip() ? ValueNorm::l1 : ValueNorm::output;
  if (policy.recent > 2 && random.flip()) {
    policy.tail_begin = policy.sinks + random.integer(0, 3);
    policy.tail_end = policy.tail_begin + random.integer(1, policy.recent - 1);
  }
  return policy;
}

constexpr KvPolicy kLargest{.sinks = 3, .heavy = 6, .recent = 6, .value_norm = ValueNorm::output};
constexpr KvPolicy kUnlimited{.heavy = 100, .recent = 100, .value_norm = ValueNorm::output};

// With rolling or original positions, and slots for policies that evict or for all.
SessionOptions random_options(Random& random, int32_t n_sequences) {
  const DType types[] = {DType::f32, DType::f16, DType::bf16};
  const DType dtype = types[random.integer(0, 2)];
  return {.policies = {random.flip() ? kLargest : kUnlimited},
          .n_ctx = 40,
          .n_batch = 50,
          .n_sequences = n_sequences,
          .k_dtype = dtype,
          .v_dtype = dtype,
          .positions = random.flip() ? Positions::original : Positions::automatic};
}

// Its pages are fewer than a text of 40 tokens fills.
ArchiveOptions random_archive(Random& random, const Config& config) {
  ArchiveOptions archive{.n_recalled = random.integer(1, 2),
                         .k_dtype = random.flip() ? DType::f16 : DType::f32,
                         .v_dtype = random.flip() ? DType::f16 : DType::bf16};
  if (config.head_dim % 32 == 0 && random.flip()) archive.k_dtype = DType::q3;
  return archive;
}

using Bytes = std::vector<std::byte>;

Bytes state(const Session& session, int32_t sequence) {
  SnapshotText text;
  text.tokens.resize(session.tokens_seen(sequence));
  return session.save(sequence, std::move(text));
}

// A text, and the states and logits of plain decoding after each of its tokens.
struct Plain {
  std::vector<int32_t> tokens;
  size_t n_prompt;
  std::vector<Bytes> states;               // after the prompt, then after each token
  std::vector<std::vector<float>> logits;  // the same
};

Plain decode(Session& session, const std::vector<int32_t>& tokens, size_t n_prompt) {
  Plain plain{tokens, n_prompt, {}, {}};
  for (size_t n = n_prompt; n <= tokens.size(); ++n) {
    const size_t begin = n == n_prompt ? 0 : n - 1;
    plain.logits.push_back(feed(session, 0, {tokens.begin() + begin, tokens.begin() + n}));
    plain.states.push_back(state(session, 0));
  }
  return plain;
}

// One of several texts that are decoded together with drafts.
class Drafted {
 public:
  Drafted(Session& session, const Plain& plain, int32_t sequence)
      : session_(session), plain_(plain), sequence_(sequence) {}

  bool ended() const { return seen() == plain_.tokens.size(); }
  bool reads_prompt() const { return seen() == 0; }

  // The prompt, or the next token with up to `most` drafts, each of which may be wrong.
  Input next(Random& random, int32_t most) {
    const auto unread = std::span(plain_.tokens).subspan(seen());
    const bool prompt = seen() == 0;
    const auto n_certain = prompt ? static_cast<int32_t>(plain_.n_prompt) : 1;
    const int32_t room = session_.chunk(sequence_) - n_certain;
    n_drafts_ = prompt ? 0 : random.integer(0, std::clamp(most, 0, room));
    tokens_.assign(unread.begin(), unread.begin() + n_certain);
    for (int32_t i = 0; i < n_drafts_; ++i) {
      const bool is_right = i + 1 < std::ssize(unread) && random.integer(0, 3) > 0;
      tokens_.push_back(is_right ? unread[i + 1] : random.integer(0, 60));
    }
    return {sequence_, tokens_, n_drafts_};
  }

  // Compares the logits of the certain token and of right drafts; retracts the others.
  void verify(std::span<const float> logits) {
    const size_t n_vocab = logits.size() / (n_drafts_ + 1);
    const size_t first = seen() - n_drafts_ - plain_.n_prompt;
    int32_t n_right = 0;
    while (true) {
      CHECK(std::ranges::equal(logits.subspan(n_right * n_vocab, n_vocab),
                               plain_.logits[first + n_right]));
      const size_t at = first + n_right + plain_.n_prompt;
      if (n_right == n_drafts_ || at == plain_.tokens.size()) break;
      if (tokens_[tokens_.size() - n_drafts_ + n_right] != plain_.tokens[at]) break;
      ++n_right;
    }
    if (n_right < n_drafts_) session_.retract(sequence_, n_drafts_ - n_right);
    n_retracted += n_drafts_ - n_right;
    n_accepted += n_right;
    CHECK(state(session_, sequence_) == plain_.states[first + n_right]);
  }

  int64_t n_retracted = 0, n_accepted = 0;

 private:
  size_t seen() const { return session_.tokens_seen(sequence_); }

  Session& session_;
  const Plain& plain_;
  int32_t sequence_;
  int32_t n_drafts_ = 0;
  std::vector<int32_t> tokens_;
};

struct Counts {
  int64_t accepted = 0, retracted = 0, rolled = 0, evicted = 0, archived = 0;
};

// Decodes random texts together, with drafts, and compares with each alone without.
void check_drafts(const std::string& path, uint64_t seed, Counts& counts) {
  Random random(seed);
  const int32_t n_sequences = random.integer(1, 3);
  SessionOptions options = random_options(random, n_sequences);
  const auto model = load(path.c_str(), 1);
  if (options.policies[0] == kLargest && model->config.can_roll() && random.flip()) {
    options.positions = Positions::rolling;
  } else if (model->config.alibi_max_bias == 0 && random.flip()) {
    options.archive = random_archive(random, model->config);
  }
  std::vector<Plain> plain;
  std::vector<std::vector<KvPolicy>> policies(n_sequences);
  for (std::vector<KvPolicy>& own : policies) {
    Session session(model, options);
    const bool limited = options.policies[0] == kLargest || random.flip();
    own = {limited ? random_policy(random) : random.flip() ? KvPolicy{} : kUnlimited};
    session.reset(0, own);
    const int32_t n_prompt = random.integer(1, 20);
    const int32_t n = random.integer(n_prompt, std::min(session.room(0), 60));
    plain.push_back(decode(session, random_tokens(random, session.model(), n), n_prompt));
    counts.rolled += session.rolling(0);
    counts.evicted += session.tokens_kept(0) < n;
    counts.archived += session.archive_bytes() > 0;
  }

  options.max_drafts = 7;
  Session session(load(path.c_str(), random.integer(1, 3)), options);
  // Where rows of a step are limited, a prompt has a step of its own, as without drafts.
  const int32_t most_rows = session.model().backend->capabilities().draft_rows;
  std::vector<Drafted> texts;
  for (int32_t s = 0; s < n_sequences; ++s) {
    session.reset(s, policies[s]);
    texts.emplace_back(session, plain[s], s);
  }
  while (!std::ranges::all_of(texts, &Drafted::ended)) {
    std::vector<Input> inputs;
    std::vector<Drafted*> reading;
    int32_t left = std::min(options.max_drafts, most_rows - n_sequences);
    for (Drafted& text : texts) {
      const bool alone = text.reads_prompt() && most_rows < options.n_batch;
      if (text.ended() || random.integer(0, 3) == 0 || (alone && !inputs.empty())) continue;
      inputs.push_back(text.next(random, left));
      reading.push_back(&text);
      left -= inputs.back().n_drafts;
      if (alone) break;
    }
    if (inputs.empty()) continue;
    std::span<const float> logits = session.step(inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const size_t n = inputs[i].n_logits() * session.model().config.n_vocab;
      reading[i]->verify(logits.first(n));
      logits = logits.subspan(n);
    }
    CHECK(logits.empty());
  }
  for (const Drafted& text : texts) {
    counts.retracted += text.n_retracted;
    counts.accepted += text.n_accepted;
  }
}

TEST_CASE("drafts leave the states and the logits of plain decoding") {
  if (on_vulkan()) return;
  const int n_seeds = on_cuda() ? 5 : 20;
  int64_t n_rolled = 0, n_archived = 0;
  for (const char* name : {"llama_gqa2_tied", "gemma2", "bloom", "qwen3moe", "opt_odd_heads",
                           "qwen35_listed", "lfm2"}) {
    CAPTURE(name);
    Counts counts;
    for (int seed = 0; seed < n_seeds; ++seed) {
      CAPTURE(seed);
      check_drafts(concat(H2O_SOURCE_DIR "/tests/data/golden/", name, ".gguf"), seed, counts);
    }
    CHECK(counts.accepted > 4 * n_seeds);
    CHECK(counts.retracted > 4 * n_seeds);
    CHECK(counts.evicted > n_seeds / 2);
    n_rolled += counts.rolled;
    n_archived += counts.archived;
  }
  CHECK(n_rolled > n_seeds / 2);
  CHECK(n_archived > n_seeds / 2);
}

// Proposes what plain decoding generates, where it does not propose something else.
class Oracle final : public Drafter {
 public:
  Oracle(std::vector<int32_t> tokens, uint64_t seed)
      : tokens_(std::move(tokens)), random_(seed), share_right_(random_.integer(0, 4)) {}

  std::span<const int32_t> propose(std::span<const int32_t> tokens,
                                   const DraftStep& step) override {
    CHECK(std::ssize(step.times) > step.most);
    draft_.resize(random_.integer(0, step.most + 2));  // more than it may
    for (size_t i = 0; i < draft_.size(); ++i) {
      const size_t at = tokens.size() + i;
      const bool is_right = at < tokens_.size() && random_.integer(0, 3) < share_right_;
      draft_[i] = is_right ? tokens_[at] : random_.integer(0, 60);
    }
    return draft_;
  }

 private:
  const std::vector<int32_t> tokens_;
  Random random_;
  const int32_t share_right_;
  std::vector<int32_t> draft_;
};

std::vector<std::byte> saved(Engine& engine, const Engine::Handle& generation) {
  return engine.save(generation, "", no_interrupt);
}

// Everything that a request leaves.
struct Result {
  Outcome outcome;
  std::vector<std::pair<std::string, int32_t>> pieces;
  std::vector<TokenLogprob> logprobs;
  std::vector<float> logits;
  std::vector<std::byte> snapshot;
};

Request prepared(Request request, Random& random) {
  if (random.flip()) request.trace = std::make_shared<Trace>(TraceOptions{.n_top = 2});
  if (random.integer(0, 3) == 0) request.constraint = only_a();
  request.allow_logits = random.flip();
  request.keeps_cache = true;
  return request;
}

Result result(Engine& engine, const Engine::Handle& generation) {
  Result result;
  while (const std::optional<Piece> piece = engine.next(generation, no_interrupt)) {
    result.pieces.emplace_back(piece->text, piece->n_tokens);
  }
  result.outcome = outcome(*generation);
  if (const Trace* trace = generation->request().trace.get())
    result.logprobs = trace->logprobs(0, 1000);
  result.logits.assign(generation->logits().begin(), generation->logits().end());
  result.snapshot = saved(engine, generation);
  return result;
}

TEST_CASE("requests with drafts have the results of requests without") {
  if (on_vulkan()) return;
  const auto model = rotary_model();
  int64_t n_accepted = 0, n_wrong = 0;
  const int n_seeds = on_cuda() ? 10 : 40;
  for (int seed = 0; seed < n_seeds; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const auto plain_engine = make_engine(model, engine_options(1));
    std::vector<Request> requests;
    std::vector<Result> expected;
    const int32_t n = on_cuda() ? 1 : random.integer(1, 4);  // rows depend on others there
    for (int32_t i = 0; i < n; ++i) {
      requests.push_back(prepared(random_request(random), random));
      Request plain = requests.back();
      if (plain.trace) plain.trace = std::make_shared<Trace>(plain.trace->options());
      expected.push_back(result(*plain_engine, plain_engine->submit(plain)));
    }
    SessionOptions options = engine_options(n);
    options.max_drafts = random.integer(1, 9);
    const auto engine = make_engine(model, options);
    std::vector<Engine::Handle> generations;
    for (int32_t i = 0; i < n; ++i) {
      requests[i].eager = random.flip();
      if (random.integer(0, 4) > 0) {
        requests[i].drafter = std::make_shared<Oracle>(expected[i].outcome.tokens, random.bits());
      }
      generations.push_back(engine->submit(requests[i]));
    }
    for (int32_t i = 0; i < n; ++i) {
      const Result got = result(*engine, generations[i]);
      CHECK(got.outcome == expected[i].outcome);
      CHECK(got.pieces == expected[i].pieces);
      CHECK(got.logits == expected[i].logits);
      CHECK(got.snapshot == expected[i].snapshot);
      REQUIRE(got.logprobs.size() == expected[i].logprobs.size());
      for (size_t j = 0; j < got.logprobs.size(); ++j) {
        CHECK(got.logprobs[j].logprob == expected[i].logprobs[j].logprob);
        CHECK(got.logprobs[j].top == expected[i].logprobs[j].top);
      }
      const Progress progress = generations[i]->progress();
      CHECK(progress.n_accepted <= progress.n_drafted);
      n_accepted += progress.n_accepted;
      n_wrong += progress.n_drafted - progress.n_accepted;
    }
    CHECK(engine->stats().evictions == plain_engine->stats().evictions);
    CHECK(engine->stats().generated_tokens == plain_engine->stats().generated_tokens);
  }
  CHECK(n_accepted > n_seeds);
  CHECK(n_wrong > n_seeds);
}

TEST_CASE("drafts with masks that are not ready, and with saved prefixes") {
  if (on_vulkan()) return;
  const auto model = rotary_model();
  int64_t n_accepted = 0, n_cached = 0;
  const int n_seeds = on_cuda() ? 10 : 40;
  for (uint64_t seed = 0; seed < static_cast<uint64_t>(n_seeds); ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Request request;
    request.prompt = random_tokens(random, *model, 33);
    request.sampling.seed = seed;
    request.max_tokens = 3;
    request.ignore_end = true;
    if (random.flip()) {
      request.constraint = [](std::span<const int32_t> tokens, std::span<uint32_t> allowed) {
        std::ranges::fill(allowed, 0x55555555u << tokens.size() % 2);
      };
    }
    SessionOptions options = engine_options(1);
    if (random.flip()) options.policies = {};
    options.max_drafts = 4;
    const PrefixCacheOptions prefixes{.max_bytes = 1 << 20, .ends = true, .disk = {}};
    const auto make = [&] {
      return Engine(model, LetterVocabulary::get().tokenizer(), options, prefixes);
    };
    Engine plain_engine = make(), engine = make();
    for (int i = 0; i < 2; ++i) {
      const Outcome expected = finished(plain_engine, plain_engine.submit(request));
      Request drafted = request;
      drafted.drafter = std::make_shared<Oracle>(expected.tokens, random.bits());
      if (drafted.constraint) {
        drafted.constraint_ready = [&](std::span<const int32_t>) { return random.flip(); };
      }
      const auto generation = engine.submit(drafted);
      CHECK(finished(engine, generation) == expected);
      CHECK(engine.stats().cached_tokens == plain_engine.stats().cached_tokens);
      CHECK(engine.stats().prefix_bytes == plain_engine.stats().prefix_bytes);
      n_accepted += generation->progress().n_accepted;
      n_cached += generation->progress().n_cached;
      request.prompt = expected.tokens;  // continues the output
    }
  }
  CHECK(n_accepted > n_seeds / 4);
  CHECK(n_cached > 12 * n_seeds);
}

// Prompt lookup after some tokens, if each draft takes `cost` times what a step without takes.
std::vector<int32_t> proposed(LookupDrafter& drafter, const std::vector<int32_t>& tokens,
                              int32_t most, double cost, int32_t n_others = 0) {
  std::vector<double> times;
  for (int32_t n = 0; n <= most; ++n) times.push_back(1 + n * cost);
  const std::span<const int32_t> found = drafter.propose(tokens, {most, n_others, times});
  return {found.begin(), found.end()};
}

TEST_CASE("prompt lookup proposes what followed the longest earlier occurrence") {
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3};
  const auto at_first = [](const std::vector<int32_t>& after, int32_t most, double cost,
                           int32_t n_others = 0) {
    LookupDrafter drafter;
    return proposed(drafter, after, most, cost, n_others);
  };
  using Tokens = std::vector<int32_t>;
  CHECK(at_first(tokens, 3, 0) == Tokens{4, 9, 2});
  CHECK(at_first({1, 2, 3}, 3, 0).empty());
  CHECK(at_first({1}, 3, 0).empty());
  CHECK(at_first({}, 3, 0).empty());
  CHECK(at_first({5, 7, 5, 7}, 5, 0) == Tokens{5, 7, 5, 7, 5});  // a repetition goes on
  CHECK(at_first(tokens, 3, 1).empty());                         // in twice the time
  // For one of ten texts, which then all take 1.15 times as long.
  CHECK(at_first(tokens, 3, 0.15) == Tokens{4, 9});
  CHECK(at_first(tokens, 3, 0.15, 9).empty());
}

TEST_CASE("prompt lookup stops where it is wrong, and returns where it is right") {
  Random random(1);
  LookupDrafter drafter;
  std::vector<int32_t> tokens(50);
  for (int32_t& token : tokens) token = random.integer(0, 4);
  const auto n_proposed = [&](int n, const auto& next) {
    size_t last = 0;
    for (int i = 0; i < n; ++i) {
      last = proposed(drafter, tokens, 4, 0.3).size();
      tokens.push_back(next());
    }
    return last;
  };
  CHECK(n_proposed(300, [&] { return random.integer(0, 4); }) == 0);
  CHECK(n_proposed(300, [&] { return tokens[tokens.size() - 50]; }) == 4);
}

// The share of n steps that have proposals, and the number of drafts.
struct Paced {
  double proposals = 0, drafts = 0;
};
// right: the chance of a guess; verify: the time of a draft, as a share of a step's.
Paced paced(DraftPace& pace, int n, double right, double verify, double preparation = 0) {
  Random random(1);
  constexpr int32_t kDrafts = 8;
  std::vector<double> times;
  for (int32_t i = 0; i <= kDrafts; ++i) times.push_back(1 + i * verify);
  const DraftStep step{kDrafts, 0, times, 1};
  Paced found;
  for (int i = 0; i < n; ++i) {
    if (!pace.is_due()) continue;
    const int32_t n_drafts = pace.choose(step, kDrafts, {});
    if (n_drafts == 0) continue;
    pace.note_preparation(preparation);
    pace.note_proposal(0);
    found.proposals += 1.0 / n;
    found.drafts += n_drafts;
    for (int32_t j = 0; j < n_drafts; ++j) {
      const bool is_right = random.integer(1, 100) <= 100 * right;
      pace.count(is_right);
      if (!is_right) break;
    }
  }
  return found;
}

TEST_CASE("proposals that do not pay are tried less and less often, until they pay") {
  DraftPace pace({4, 5});
  CHECK(paced(pace, 2000, 0, 0.2).proposals < 0.02);
  const Paced tries = paced(pace, 4000, 0, 0.2);
  CHECK(tries.proposals > 0);
  CHECK(tries.proposals < 0.002);
  CHECK(paced(pace, 4000, 1, 0.2).proposals > 0.5);
  CHECK(paced(pace, 1000, 1, 0.2).drafts == 8 * 1000);  // as many as possible, in every step
  CHECK(paced(pace, 1000, 1, 1).proposals < 0.3);       // nothing is gained, though all are right
}

TEST_CASE("what prepares a try is paid for by the steps after it") {
  for (const double preparation : {0.0, 20.0, 40.0}) {
    CAPTURE(preparation);
    DraftPace pace({1, 5});
    const double proposals = paced(pace, 10'000, 0, 0.2, preparation).proposals;
    CHECK(proposals > 0);
    CHECK(proposals * (preparation + 4 * 0.2) <= 0.05);
  }
}

TEST_CASE("other texts say how often guesses are right") {
  GuessRate usual{4, 5};
  for (int i = 0; i < 100; ++i) usual.add(false);
  DraftPace hopeless(usual), hopeful({4, 5});
  CHECK(paced(hopeless, 1, 1, 0.2).proposals == 0);
  CHECK(paced(hopeful, 1, 1, 0.2).proposals == 1);
}

TEST_CASE("the times of drafts are medians, and are forgotten without drafts") {
  DraftCost cost(8);
  const double guess = cost.shares()[5];
  for (int i = 0; i < 300; ++i) {
    const bool is_interrupted = i % 4 == 0;
    cost.add(0, is_interrupted ? 50.0 : 2.0);
    cost.add(5, is_interrupted ? 90.0 : 2.0 + 5 * 1.0);
  }
  CHECK(cost.shares()[5] == doctest::Approx(3.5).epsilon(0.15));
  CHECK(cost.shares()[0] == 1);
  for (int i = 0; i < 3000; ++i) cost.add(0, 2.0);
  CHECK(cost.shares()[5] == doctest::Approx(guess).epsilon(0.02));
}

TEST_CASE("drafts that are not supported are errors") {
  const auto model = rotary_model();
  SessionOptions options = engine_options(1);
  options.max_drafts = 2;
  if (on_vulkan()) {
    CHECK_THROWS_WITH_AS(Session(model, options), doctest::Contains("device=cpu"), InvalidArgument);
    return;
  }
  Session session(model, options);
  const std::vector<int32_t> tokens = {1, 2, 3, 4};
  for (const int32_t n : {-1, 3, 4, 5}) {
    const Input input{0, tokens, n};
    CHECK_THROWS_AS(session.step({&input, 1}), InvalidArgument);
    CHECK(session.tokens_seen(0) == 0);
  }
  options.max_drafts = -1;
  CHECK_THROWS_AS(Session(model, options), InvalidArgument);
  if (!on_cuda()) return;
  options.max_drafts = 100;  // the most that it has
  Session limited(model, options);
  CHECK(limited.options().max_drafts == 7);
  options.n_batch = 12;
  Session wide(model, options);
  const std::vector<int32_t> nine(9, 3);
  const Input input{0, std::span(nine), 1};
  CHECK_THROWS_WITH_AS(wide.step({&input, 1}), doctest::Contains("at most 8"), InvalidArgument);
}

}  // namespace
}  // namespace h2o
