/* h2o.h: language models with a bounded, heavy-hitter KV cache, for applications. Text in, text
 * out: a session is one sequence of tokens that grows, an engine computes many requests together.
 *
 *   h2o_model* model;
 *   h2o_session* session;
 *   h2o_session_options options = H2O_SESSION_OPTIONS;
 *   options.hh = 0.2;
 *   if (h2o_model_load("model.gguf", NULL, &model) != H2O_OK) puts(h2o_model_error(model));
 *   if (h2o_session_open(model, &options, &session) != H2O_OK) puts(h2o_session_error(session));
 *   h2o_stream(session, prompt, strlen(prompt), NULL, print_piece, NULL, NULL);
 *   h2o_session_free(session);
 *   h2o_model_free(model);
 *
 * Memory. The caches and activations of a session or an engine are allocated when it is opened, and
 * do not grow. What grows is the list of tokens, 4 bytes each (8 if all of them count as repeated);
 * a call that generates or reads makes a copy, and room for the logits, and frees those of the
 * last.
 *
 * Handles. A handle belongs to one thread at a time; only h2o_cancel, h2o_request_cancel and the
 * calls with an engine may be made at any time, from any thread. A call that finds another one in
 * progress with the same handle returns H2O_BUSY and does nothing. Different handles are
 * independent: sessions and engines of one model take turns by themselves, and a model may be freed
 * before them.
 *
 * Errors. A call returns H2O_OK or says what went wrong; h2o_model_error, h2o_session_error, ...
 * have a message, in UTF-8, until the next call with that handle. A call that failed has changed
 * nothing, unless it says otherwise. Arguments are checked: an invalid NULL, and sizes and numbers
 * out of range, are H2O_INVALID_ARGUMENT. No call throws, prints or ends the process.
 *
 * Structures begin with their size, so that fields can be added: initialise each with the macro of
 * its name. A field that is added later then has its default.
 *
 * Text is UTF-8, given by pointer and number of bytes; it need not end with NUL. NULL is empty text
 * if the number is 0. Tokens are numbers below n_vocab.
 *
 * Results of unknown size go to an array of `capacity` elements that the caller has: their number
 * is always stored, and if it is larger than the capacity nothing else is, and H2O_TOO_SMALL
 * returned.
 */
#ifndef H2O_H
#define H2O_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && defined(H2O_BUILDS_DLL)
#define H2O_API __declspec(dllexport)
#elif defined(__GNUC__) && !defined(_WIN32)
#define H2O_API __attribute__((visibility("default")))
#else
#define H2O_API
#endif

#ifndef __cplusplus
#define H2O_NOEXCEPT
#elif __cplusplus >= 201103L || defined(_MSC_VER)
#define H2O_NOEXCEPT noexcept
#else
#define H2O_NOEXCEPT throw()
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* Programs built with one value work with every library that has the same. */
#define H2O_ABI_VERSION 1
H2O_API uint32_t h2o_abi_version(void) H2O_NOEXCEPT; /* the library's */
H2O_API const char* h2o_version(void) H2O_NOEXCEPT;  /* of the library, as "0.2.0" */

typedef struct h2o_model h2o_model;     /* a GGUF file made ready, with its tokenizer */
typedef struct h2o_session h2o_session; /* a sequence of tokens, and its cache */
typedef struct h2o_engine h2o_engine;   /* computes many requests together */
typedef struct h2o_request h2o_request; /* one of them: a prompt and what is generated after it */

typedef int32_t h2o_status;
enum {
  H2O_OK = 0,
  H2O_INVALID_ARGUMENT = 1,
  H2O_CANNOT_OPEN = 2, /* a file */
  H2O_BAD_FORMAT = 3,  /* a file or a snapshot is damaged, or not of the expected kind */
  H2O_OUT_OF_MEMORY = 4,
  H2O_CONTEXT_FULL = 5, /* there is no room for so many tokens */
  H2O_CANCELLED = 6,
  H2O_TOO_SMALL = 7, /* the capacity */
  H2O_BUSY = 8, /* another call is in progress with this handle; it has no message of its own */
  H2O_INTERNAL_ERROR = 9
};
H2O_API const char* h2o_status_text(h2o_status status) H2O_NOEXCEPT;

/* --- Models -------------------------------------------------------------------------------- */

typedef struct h2o_model_options {
  size_t size;
  const char* device; /* "auto" (the CPU), "cpu", "cuda" or "cuda:N"; NULL: "auto" */
  int32_t n_threads;  /* of the CPU; 0: one for each core */
  int32_t reserved;   /* 0 */
} h2o_model_options;
#define H2O_MODEL_OPTIONS {sizeof(h2o_model_options), NULL, 0, 0}

/* Loads a GGUF file; the path is UTF-8, on Windows too. options may be NULL. Whatever it returns,
 * *model is then a handle to be freed: after an error it only has the message, and is NULL where
 * memory did not suffice for that. */
H2O_API h2o_status h2o_model_load(const char* path, const h2o_model_options* options,
                                  h2o_model** model) H2O_NOEXCEPT;

/* Frees a handle, and the model when its sessions and engines are freed too; the model's threads
 * end with it. NULL is ignored. H2O_BUSY: a call is in progress with it, and nothing was freed. */
H2O_API h2o_status h2o_model_free(h2o_model* model) H2O_NOEXCEPT;

/* Why the last call failed; "" if it did not. */
H2O_API const char* h2o_model_error(const h2o_model* model) H2O_NOEXCEPT;

typedef struct h2o_model_info {
  size_t size;
  const char* architecture; /* these two live as long as the handle */
  const char* backend;      /* "cpu (x86_64_v4, 2 threads)" */
  int32_t n_vocab;
  int32_t n_ctx_train; /* the context it was trained with */
  int32_t n_layers;
  int32_t n_heads;
  int32_t n_kv_heads;
  int32_t head_dim;
  int32_t bos; /* the tokens that begin and end a sequence; -1: there is none */
  int32_t eos;
} h2o_model_info;
#define H2O_MODEL_INFO {sizeof(h2o_model_info), NULL, NULL, 0, 0, 0, 0, 0, 0, 0, 0}

H2O_API h2o_status h2o_describe(h2o_model* model, h2o_model_info* info) H2O_NOEXCEPT;

/* --- Text and tokens ------------------------------------------------------------------------ */

enum {
  H2O_ADD_SPECIAL = 1,   /* with the tokens that the model expects at the ends of a sequence */
  H2O_PARSE_SPECIAL = 2, /* special tokens that the text spells, as "</s>", are those tokens */
  H2O_CONTINUES = 4      /* other text comes before it: no space is put in front of it */
};

/* Text as tokens. flags: any of the above, added. */
H2O_API h2o_status h2o_tokenize(h2o_model* model, const char* text, size_t n_bytes, uint32_t flags,
                                int32_t* tokens, size_t capacity, size_t* n_tokens) H2O_NOEXCEPT;

/* Tokens as text, always UTF-8: other bytes become U+FFFD. A NUL follows it, which *n_bytes does
 * not count and `capacity` must have room for. */
H2O_API h2o_status h2o_detokenize(h2o_model* model, const int32_t* tokens, size_t n_tokens,
                                  char* text, size_t capacity, size_t* n_bytes) H2O_NOEXCEPT;

/* Whether a token ends a sequence or a turn: 1 or 0, also for what is no token. */
H2O_API int32_t h2o_is_end(const h2o_model* model, int32_t token) H2O_NOEXCEPT;

/* A token as the vocabulary spells it, special ones too: for variables such as bos_token in chat
 * templates. Text and capacity as with h2o_detokenize. */
H2O_API h2o_status h2o_token_text(h2o_model* model, int32_t token, char* text, size_t capacity,
                                  size_t* n_bytes) H2O_NOEXCEPT;

/* The chat template of the file, in Jinja, or NULL if it has none; it lives as long as the handle.
 * The library does not render it. A prompt that the application has rendered is to be tokenized
 * with H2O_PARSE_SPECIAL, and without H2O_ADD_SPECIAL if the template writes bos_token itself. */
H2O_API h2o_status h2o_chat_template(h2o_model* model, const char** source) H2O_NOEXCEPT;

/* --- Sessions ------------------------------------------------------------------------------- */

enum {
  H2O_POSITIONS_AUTO = 0, /* original up to the trained length, then rolling if the cache evicts */
  H2O_POSITIONS_ORIGINAL = 1, /* those of the tokens in their sequence, which ends at n_ctx */
  H2O_POSITIONS_ROLLING = 2   /* ranks in the cache: the sequence has no end */
};

typedef struct h2o_session_options {
  size_t size;
  double hh;       /* what the cache keeps, for each sequence, layer and KV head: up to 1 a fraction
                      of n_ctx (1: all of it), from 2 on a whole number of tokens; 0: everything */
  double recent;   /* how much of hh is recent tokens, likewise; negative: half of it */
  int32_t n_sinks; /* how many of hh are the first tokens, besides */
  int32_t n_ctx;   /* the context, at most as trained; 0: as trained, up to 4096 */
  int32_t n_batch; /* prompt tokens that are read at a time, with eviction after each time */
  int32_t positions;
  const char*
      k_type; /* of the cached keys: "f16", "f32", "bf16", "q8_0", "q5_0", "q4_0"; NULL: "f16" */
  const char* v_type;    /* and values */
  uint64_t prefix_cache; /* of an engine: most bytes for states of prompts, in which others that
                            begin alike go on, with the same output: after any token with a full
                            cache on a CPU, otherwise at ends of n_batch tokens. 0: none */
  const char* archive;   /* keeps what is evicted in the host's memory, in a type as of k_type; each
                            token recalls some of it. A sequence then ends at n_ctx. NULL: none */
  int32_t archive_pages; /* that each token recalls, of 16 tokens; 0: 16 */
  int32_t reserved;      /* 0 */
  const char* prefix_disk;    /* of an engine: a directory where states that leave prefix_cache, or
                                 are in it at the end, outlive it; made if need be. NULL: none */
  uint64_t prefix_disk_bytes; /* most bytes of them there; 0: 4 GiB */
  const char* archive_dir;    /* a directory where the archive is a file without a name, of its
                                 whole size from the start. NULL: it is in memory */
} h2o_session_options;
#define H2O_SESSION_OPTIONS \
  {sizeof(h2o_session_options), 0, -1, 0, 0, 512, 0, NULL, NULL, 0, NULL, 0, 0, NULL, 0, NULL}

/* Opens a session without tokens, and allocates its cache. options may be NULL. *session is to be
 * freed whatever it returns, as with h2o_model_load; it has the message of an error. */
H2O_API h2o_status h2o_session_open(h2o_model* model, const h2o_session_options* options,
                                    h2o_session** session) H2O_NOEXCEPT;

/* As h2o_model_free and h2o_model_error. A running stream is to be cancelled and waited for. */
H2O_API h2o_status h2o_session_free(h2o_session* session) H2O_NOEXCEPT;
H2O_API const char* h2o_session_error(const h2o_session* session) H2O_NOEXCEPT;

/* Forgets all tokens, and a cancel that has ended nothing yet. */
H2O_API h2o_status h2o_reset(h2o_session* session) H2O_NOEXCEPT;

/* Ends one call of h2o_stream, h2o_feed, h2o_decode, h2o_sample or h2o_logits, after its current
 * step: the one that is in progress, or else the next one, which then does not begin to compute. So
 * it is not lost, whichever comes first; but one that comes too late for a stream ends with that
 * stream. From any thread, and from signal handlers; NULL is ignored. */
H2O_API void h2o_cancel(h2o_session* session) H2O_NOEXCEPT;

typedef struct h2o_logit_bias {
  int32_t token;
  float bias; /* added to its logit; -infinity: it is never chosen */
} h2o_logit_bias;

enum { /* steps of sampling, in their order unless h2o_sampling.samplers has another */
       H2O_SAMPLER_PENALTIES = 0,
       H2O_SAMPLER_DRY = 1,
       H2O_SAMPLER_TOP_N_SIGMA = 2,
       H2O_SAMPLER_TEMPERATURE = 3,
       H2O_SAMPLER_TOP_K = 4,
       H2O_SAMPLER_TYPICAL_P = 5,
       H2O_SAMPLER_TOP_P = 6,
       H2O_SAMPLER_MIN_P = 7,
       H2O_SAMPLER_XTC = 8
};

typedef struct h2o_sampling {
  size_t size;
  float temperature;     /* 0: greedy */
  int32_t top_k;         /* 0: all */
  float top_p;           /* 1: all */
  float min_p;           /* 0: all */
  float repeat_penalty;  /* of the last repeat_last_n tokens; 1: none */
  int32_t repeat_last_n; /* -1: all */
  int32_t seeded;        /* 0: the random numbers go on, which begin differently in each session */
  uint64_t seed;         /* 1: they begin with this seed */
  float frequency_penalty; /* subtracted from the logits of these tokens, for each time */
  float presence_penalty;  /* and once */
  float
      dry_multiplier; /* penalty of tokens that extend a repetition of dry_allowed_length tokens; */
  float dry_base;     /* how it grows with each further token; multiplier 0: none */
  int32_t dry_allowed_length;
  int32_t dry_penalty_last_n; /* how far back repetitions are; -1: the context */
  size_t n_dry_breakers;
  const char* const* dry_breakers; /* no repetition goes past tokens with these strings; NULL: line
                                      breaks, colons, quotes and asterisks */
  float typical_p;                 /* the most typical tokens of this probability; 1: all */
  float top_n_sigma;               /* deviations below the largest logit; 0: all */
  float xtc_probability;           /* how often all but the least likely of the tokens */
  float xtc_threshold;             /* with this probability are left out */
  float dynatemp_range;            /* the temperature, give or take this, by the entropy; 0: none */
  float dynatemp_exponent;
  int32_t mirostat; /* version 1 or 2, in place of all that leave out tokens; 0: off */
  float mirostat_tau;
  float mirostat_eta;
  int32_t n_samplers;
  const int32_t* samplers; /* H2O_SAMPLER_*: these, in this order; NULL: all */
  size_t n_logit_bias;
  const h2o_logit_bias* logit_bias;
} h2o_sampling;
#define H2O_SAMPLING     \
  {sizeof(h2o_sampling), \
   0.8f,                 \
   40,                   \
   0.95f,                \
   0.05f,                \
   1.0f,                 \
   64,                   \
   0,                    \
   0,                    \
   0,                    \
   0,                    \
   0,                    \
   1.75f,                \
   2,                    \
   -1,                   \
   0,                    \
   NULL,                 \
   1,                    \
   0,                    \
   0,                    \
   0.1f,                 \
   0,                    \
   1,                    \
   0,                    \
   5,                    \
   0.1f,                 \
   0,                    \
   NULL,                 \
   0,                    \
   NULL}

/* How tokens are chosen from now on; NULL: by the defaults, as in a new session. */
H2O_API h2o_status h2o_set_sampling(h2o_session* session,
                                    const h2o_sampling* sampling) H2O_NOEXCEPT;

/* Called with each piece of text as it is generated: whole characters of UTF-8, never empty, with a
 * NUL behind. Returns 0 to go on; anything else ends the stream. It may call h2o_stats, h2o_kept,
 * h2o_tokens and h2o_cancel with the session. */
typedef int32_t (*h2o_piece_callback)(void* user, const char* piece, size_t n_bytes);

typedef struct h2o_stream_options {
  size_t size;
  int32_t max_tokens;      /* 0: up to n_ctx, or n_ctx more if the sequence is longer already; -1:
                              until the model ends, or n_ctx where positions cannot roll */
  int32_t ignore_end;      /* 1: go on after tokens that end a sequence or a turn */
  int32_t parse_special;   /* 1: special tokens that are spelled in the prompt are those tokens */
  size_t n_stop;           /* number of */
  const char* const* stop; /* strings that end the output and are not part of it, each with a NUL */
} h2o_stream_options;
#define H2O_STREAM_OPTIONS {sizeof(h2o_stream_options), 0, 0, 0, 0, NULL}

enum {
  H2O_FINISH_STOP = 1,     /* the model has ended, or a stop string */
  H2O_FINISH_LENGTH = 2,   /* max_tokens, or the end of the context */
  H2O_FINISH_CANCELLED = 3 /* by a cancel, a callback or an error */
};

typedef struct h2o_generation {
  size_t size;
  int32_t finish;
  int32_t n_prompt;    /* tokens to be read before the first is generated */
  int32_t n_generated; /* tokens generated */
  double prompt_seconds;
  double decode_seconds; /* for the tokens after the first, which comes with the prompt */
} h2o_generation;
#define H2O_GENERATION {sizeof(h2o_generation), 0, 0, 0, 0, 0}

/* Adds the prompt to the sequence, then generates. The prompt may be empty where there are tokens
 * to go on from. Prompt and generated tokens stay in the sequence, so that the next stream goes on
 * from there; a token that ended it does not. options and generation may be NULL.
 *
 * A stream that was cancelled returns H2O_OK; what is left of a prompt that it was reading is read
 * by the next call that needs it. After H2O_OUT_OF_MEMORY or H2O_INTERNAL_ERROR the sequence has
 * the tokens that h2o_tokens gives, which may be more than before: h2o_stats tells how many, and
 * how many of them are read; the text of the last may not have gone to the callback. */
H2O_API h2o_status h2o_stream(h2o_session* session, const char* prompt, size_t n_bytes,
                              const h2o_stream_options* options, h2o_piece_callback callback,
                              void* user, h2o_generation* generation) H2O_NOEXCEPT;

/* --- Token by token ------------------------------------------------------------------------- */

/* Adds tokens to the sequence and reads them. H2O_CANCELLED: they are part of it, but some may not
 * have been read; the next call that needs it reads the rest. After H2O_OUT_OF_MEMORY or
 * H2O_INTERNAL_ERROR the same, or none has been added: h2o_stats tells. */
H2O_API h2o_status h2o_feed(h2o_session* session, const int32_t* tokens,
                            size_t n_tokens) H2O_NOEXCEPT;

/* Chooses the next token. h2o_decode adds it. */
H2O_API h2o_status h2o_sample(h2o_session* session, int32_t* token) H2O_NOEXCEPT;

/* One step: h2o_feed of one token. */
H2O_API h2o_status h2o_decode(h2o_session* session, int32_t token) H2O_NOEXCEPT;

/* The logits after the last token [n_vocab], until the next call that changes the session. */
H2O_API h2o_status h2o_logits(h2o_session* session, const float** logits,
                              int32_t* n_vocab) H2O_NOEXCEPT;

/* --- What the cache holds ------------------------------------------------------------------- */

typedef struct h2o_session_stats {
  size_t size;
  int32_t n_tokens;  /* of the sequence */
  int32_t n_read;    /* of them, those that have been through the model */
  int32_t n_kept;    /* of those, by the layer that keeps most, in each KV head */
  int32_t n_evicted; /* n_read - n_kept */
  int32_t n_ctx;
  int32_t room;              /* how many more tokens can be read */
  uint64_t cache_bytes;      /* allocated, all layers */
  uint64_t full_cache_bytes; /* what the cache of all n_ctx tokens would take */
  uint64_t archive_bytes;    /* of what was evicted, where there is an archive */
} h2o_session_stats;
#define H2O_SESSION_STATS {sizeof(h2o_session_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0}

H2O_API h2o_status h2o_stats(h2o_session* session, h2o_session_stats* stats) H2O_NOEXCEPT;

/* The positions in the sequence of the tokens that one KV head of a layer keeps, ascending, and the
 * attention that each has received (0 where the cache keeps no scores). scores may be NULL. */
H2O_API h2o_status h2o_kept(h2o_session* session, int32_t layer, int32_t kv_head,
                            int32_t* positions, float* scores, size_t capacity,
                            size_t* n_kept) H2O_NOEXCEPT;

/* The tokens of the sequence. */
H2O_API h2o_status h2o_tokens(h2o_session* session, int32_t* tokens, size_t capacity,
                              size_t* n_tokens) H2O_NOEXCEPT;

/* --- Snapshots ------------------------------------------------------------------------------ */

/* The tokens, the cache and the random numbers as bytes, for one model and one set of session
 * options, to be freed with h2o_snapshot_free. The Python package writes and reads the same. */
H2O_API h2o_status h2o_snapshot_save(h2o_session* session, void** bytes,
                                     size_t* n_bytes) H2O_NOEXCEPT;
H2O_API void h2o_snapshot_free(void* bytes) H2O_NOEXCEPT;

/* The session goes on as the one that was saved would have, bit for bit, from the logits on; the
 * options of sampling are its own. H2O_BAD_FORMAT: the bytes are damaged, or of another model or
 * options. */
H2O_API h2o_status h2o_snapshot_load(h2o_session* session, const void* bytes,
                                     size_t n_bytes) H2O_NOEXCEPT;

/* --- Many requests at once ------------------------------------------------------------------ */

/* Opens an engine for up to max_sequences requests at a time, and allocates their caches; more wait
 * until one has ended. Each request gives the text that a session with the same options would.
 * options may be NULL. *engine is to be freed whatever it returns, as with h2o_model_load. */
H2O_API h2o_status h2o_engine_open(h2o_model* model, const h2o_session_options* options,
                                   int32_t max_sequences, h2o_engine** engine) H2O_NOEXCEPT;

/* Ends all requests, after the step that is being computed, and frees their caches; the requests
 * are still to be freed. No other call with the engine may be in progress, other than with its
 * requests. H2O_OUT_OF_MEMORY: nothing was freed. */
H2O_API h2o_status h2o_engine_free(h2o_engine* engine) H2O_NOEXCEPT;

/* Why h2o_engine_open failed; "" if it did not. */
H2O_API const char* h2o_engine_error(const h2o_engine* engine) H2O_NOEXCEPT;

typedef struct h2o_engine_info {
  size_t size;
  int32_t n_sequences; /* the most at a time */
  int32_t n_active;    /* requests that are being computed */
  int32_t n_waiting;   /* requests that wait for a sequence */
  int32_t n_ctx;
  uint64_t cache_bytes;      /* allocated, all sequences */
  uint64_t prompt_tokens;    /* read so far, of all requests */
  uint64_t generated_tokens; /* generated so far */
  uint64_t cached_tokens;    /* of prompts, not read again: the prefix cache had them */
  uint64_t prefix_bytes;     /* of the prefix cache */
} h2o_engine_info;
#define H2O_ENGINE_INFO {sizeof(h2o_engine_info), 0, 0, 0, 0, 0, 0, 0, 0, 0}

H2O_API h2o_status h2o_engine_describe(h2o_engine* engine, h2o_engine_info* info) H2O_NOEXCEPT;

/* Says which tokens may come next: sets their bits in `allowed`, token i in bit i % 32 of word
 * i / 32, all of them 0 before. tokens: all so far, of the prompt and generated. A token that ends
 * the output must be allowed for it to end. Returns 0 to go on; after anything else the request
 * ends with H2O_CANCELLED. It runs in a thread that computes, of the engine or in h2o_request_next,
 * and must not wait for it: h2o_request_next, h2o_request_free and h2o_engine_free return H2O_BUSY
 * there. */
typedef int32_t (*h2o_constraint_callback)(void* user, const int32_t* tokens, size_t n_tokens,
                                           uint32_t* allowed, size_t n_words);

typedef struct h2o_request_options {
  size_t size;
  const h2o_sampling* sampling;     /* NULL: the defaults; without a seed all requests differ */
  const h2o_stream_options* limits; /* NULL: the defaults */
  const int32_t* tokens;            /* the prompt as tokens, where it is not given as text */
  size_t n_tokens;
  h2o_constraint_callback constraint; /* NULL: all tokens may come */
  void* user;                         /* for it, until the request has ended or is freed */
  int32_t n_top;    /* log-probabilities of each token and so many of the likeliest; -1: none */
  int32_t reserved; /* 0 */
} h2o_request_options;
#define H2O_REQUEST_OPTIONS {sizeof(h2o_request_options), NULL, NULL, NULL, 0, NULL, NULL, -1, 0}

/* Hands in a request, which threads of the engine compute from now on; any number may be handed in,
 * by any threads. Text is tokenized as the beginning of a sequence. options may be NULL; what it
 * points to need only live until the call returns. *request is to be freed whatever it returns; it
 * has the message of an error. */
H2O_API h2o_status h2o_engine_submit(h2o_engine* engine, const char* prompt, size_t n_bytes,
                                     const h2o_request_options* options,
                                     h2o_request** request) H2O_NOEXCEPT;

/* Waits for the next piece of text: whole characters, with a NUL behind, until the next call with
 * the request. *n_bytes is 0, and *piece NULL, when it has ended. Returns the error that has ended
 * it, once. */
H2O_API h2o_status h2o_request_next(h2o_request* request, const char** piece,
                                    size_t* n_bytes) H2O_NOEXCEPT;

/* As h2o_request_next, but does not wait: gives all text that is there, or none. */
H2O_API h2o_status h2o_request_poll(h2o_request* request, const char** piece,
                                    size_t* n_bytes) H2O_NOEXCEPT;

/* Ends it, now or after the step that is being computed. From any thread; NULL is ignored. */
H2O_API void h2o_request_cancel(h2o_request* request) H2O_NOEXCEPT;

/* Ends it, waits for the step that is being computed, and frees the handle. NULL is ignored.
 * H2O_BUSY: a call is in progress with it, and nothing was freed. */
H2O_API h2o_status h2o_request_free(h2o_request* request) H2O_NOEXCEPT;
H2O_API const char* h2o_request_error(const h2o_request* request) H2O_NOEXCEPT;

/* What has become of it so far; finish is 0 until it has ended. */
H2O_API h2o_status h2o_request_result(h2o_request* request,
                                      h2o_generation* generation) H2O_NOEXCEPT;

/* All text and all tokens that it has generated so far; text and capacity as with h2o_detokenize.
 */
H2O_API h2o_status h2o_request_text(h2o_request* request, char* text, size_t capacity,
                                    size_t* n_bytes) H2O_NOEXCEPT;
H2O_API h2o_status h2o_request_tokens(h2o_request* request, int32_t* tokens, size_t capacity,
                                      size_t* n_tokens) H2O_NOEXCEPT;

typedef struct h2o_logprob {
  int32_t token;
  float
      logprob; /* natural logarithm, of the model's own distribution: before all sampling options */
} h2o_logprob;

/* How likely the i-th generated token was, and the n_top likeliest, likeliest first. */
H2O_API h2o_status h2o_request_logprobs(h2o_request* request, size_t i, h2o_logprob* logprob,
                                        h2o_logprob* top, size_t capacity,
                                        size_t* n_top) H2O_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif /* H2O_H */
