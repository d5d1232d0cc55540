/* h2o.h: language models with a bounded KV cache that keeps heavy hitters, for applications. A
 * session is one growing sequence of tokens; an engine computes many requests together.
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
 * do not grow, except those that propose drafts, of which each text gets one when it is first
 * guessed. The list of tokens grows, by 4 bytes per token (up to 8 if repeat_last_n covers them
 * all). A call that generates or reads copies it and allocates the logits, and frees those of the
 * call before.
 *
 * Handles. One thread at a time may use a handle; only h2o_cancel, h2o_clear_cancel,
 * h2o_request_cancel and the calls with an engine may be made at any time, from any thread. A call
 * while another one with the same handle is in progress returns H2O_BUSY and does nothing.
 * Different handles are independent: sessions and engines of one model wait for each other as
 * needed, and a model may be freed before them.
 *
 * Errors. A call returns H2O_OK or another status; h2o_model_error, h2o_session_error, ... return a
 * message, in UTF-8, which is valid until the next call with that handle. A call that failed has
 * changed nothing, unless its comment says otherwise. An invalid NULL, and sizes and numbers out of
 * range, are H2O_INVALID_ARGUMENT. No call throws, prints or ends the process.
 *
 * Structures begin with their size, so that later versions can add fields: initialize each with the
 * macro of its name. A field that is added later then has its default.
 *
 * Text is UTF-8, given by a pointer and the number of bytes; it need not end with NUL. NULL with 0
 * bytes is empty text. Tokens are numbers from 0 to n_vocab - 1.
 *
 * Results of unknown size go to an array of the caller, with `capacity` elements. Their number is
 * always stored; if it is larger than the capacity, nothing else is, and H2O_TOO_SMALL is returned.
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

/* Programs built with one version work with every library that has the same. */
#define H2O_ABI_VERSION 1
H2O_API uint32_t h2o_abi_version(void) H2O_NOEXCEPT; /* the library's */
H2O_API const char* h2o_version(void) H2O_NOEXCEPT;  /* the library's, such as "0.3.0" */

typedef struct h2o_model h2o_model;     /* a loaded GGUF file, with its tokenizer */
typedef struct h2o_session h2o_session; /* a sequence of tokens, and its cache */
typedef struct h2o_engine h2o_engine;   /* computes many requests together */
typedef struct h2o_request h2o_request; /* one of them: a prompt and its output */

typedef int32_t h2o_status;
enum {
  H2O_OK = 0,
  H2O_INVALID_ARGUMENT = 1,
  H2O_CANNOT_OPEN = 2, /* a file */
  H2O_BAD_FORMAT = 3,  /* a file or a snapshot is damaged, or not of the expected kind */
  H2O_OUT_OF_MEMORY = 4,
  H2O_CONTEXT_FULL = 5, /* the tokens do not fit in the context */
  H2O_CANCELLED = 6,
  H2O_TOO_SMALL = 7, /* the capacity */
  H2O_BUSY = 8,      /* another call with this handle is in progress; there is no message */
  H2O_INTERNAL_ERROR = 9
};

/* A status in words, in English; the string is static. */
H2O_API const char* h2o_status_text(h2o_status status) H2O_NOEXCEPT;

/* --- Models -------------------------------------------------------------------------------- */

typedef struct h2o_model_options {
  size_t size;
  const char* device; /* "auto", "cpu", "cuda[:N]" or "vulkan[:N]"; NULL: "auto" */
  int32_t n_threads;  /* CPU threads; 0: one per core */
  int32_t reserved;   /* 0 */
} h2o_model_options;
#define H2O_MODEL_OPTIONS {sizeof(h2o_model_options), NULL, 0, 0}

/* Loads a GGUF file; the path is UTF-8, on Windows too. options may be NULL. Free *model whatever
 * this returns: after an error the handle only has the message, or is NULL if there was no memory
 * for that. "auto" is the CPU; with the environment variable H2O_CUDA_AUTO=1 it is the GPU if there
 * is one that can load the model. h2o_model_info.backend names what is in use. */
H2O_API h2o_status h2o_model_load(const char* path, const h2o_model_options* options,
                                  h2o_model** model) H2O_NOEXCEPT;

/* Frees a handle; the model and its threads are freed with the last of its sessions and engines.
 * NULL is ignored. H2O_BUSY: a call with the handle is in progress, and nothing was freed. */
H2O_API h2o_status h2o_model_free(h2o_model* model) H2O_NOEXCEPT;

/* Why the last call with the handle failed; "" if it did not. */
H2O_API const char* h2o_model_error(const h2o_model* model) H2O_NOEXCEPT;

typedef struct h2o_model_info {
  size_t size;
  const char* architecture; /* such as "llama"; valid as long as the handle, like backend */
  const char* backend;      /* such as "cpu (x86_64_v4, 2 threads)" */
  int32_t n_vocab;
  int32_t n_ctx_train; /* the trained length, in tokens */
  int32_t n_layers;
  int32_t n_heads;
  int32_t n_kv_heads;
  int32_t head_dim;
  int32_t bos; /* beginning- and end-of-text tokens; -1: none */
  int32_t eos;
} h2o_model_info;
#define H2O_MODEL_INFO {sizeof(h2o_model_info), NULL, NULL, 0, 0, 0, 0, 0, 0, 0, 0}

H2O_API h2o_status h2o_describe(h2o_model* model, h2o_model_info* info) H2O_NOEXCEPT;

/* --- Text and tokens ------------------------------------------------------------------------ */

enum {
  H2O_ADD_SPECIAL = 1,   /* add the tokens that the model expects, such as BOS */
  H2O_PARSE_SPECIAL = 2, /* parse special tokens in the text, such as "</s>" */
  H2O_CONTINUES = 4      /* the text continues another: no space is prepended */
};

/* Tokens of a text. flags: any of the above, combined with |. */
H2O_API h2o_status h2o_tokenize(h2o_model* model, const char* text, size_t n_bytes, uint32_t flags,
                                int32_t* tokens, size_t capacity, size_t* n_tokens) H2O_NOEXCEPT;

/* Text of tokens, always UTF-8: invalid bytes become U+FFFD. It ends with a NUL, which counts in
 * `capacity` but not in *n_bytes. */
H2O_API h2o_status h2o_detokenize(h2o_model* model, const int32_t* tokens, size_t n_tokens,
                                  char* text, size_t capacity, size_t* n_bytes) H2O_NOEXCEPT;

/* 1 if a token ends a text or a turn; otherwise 0, also for numbers that are not tokens. */
H2O_API int32_t h2o_is_end(const h2o_model* model, int32_t token) H2O_NOEXCEPT;

/* The spelling of a token in the vocabulary, also of special ones: for variables such as bos_token
 * in chat templates. Text and capacity as for h2o_detokenize. */
H2O_API h2o_status h2o_token_text(h2o_model* model, int32_t token, char* text, size_t capacity,
                                  size_t* n_bytes) H2O_NOEXCEPT;

/* The file's chat template, in Jinja, or NULL if it has none; valid as long as the handle. The
 * library does not render it. Tokenize what the application renders with H2O_PARSE_SPECIAL, and
 * without H2O_ADD_SPECIAL if the template writes bos_token itself. */
H2O_API h2o_status h2o_chat_template(h2o_model* model, const char** source) H2O_NOEXCEPT;

/* --- Sessions ------------------------------------------------------------------------------- */

enum {
  H2O_POSITIONS_AUTO = 0, /* original up to the trained length, then rolling if the cache evicts */
  H2O_POSITIONS_ORIGINAL = 1, /* positions in the sequence, which ends at n_ctx */
  H2O_POSITIONS_ROLLING = 2   /* ranks among the kept tokens: the sequence never ends */
};

/* Where guesses of the next tokens come from. One pass verifies all guesses of a text, and the
 * output is the same without them. Where no gain is expected, nothing is guessed. */
enum {
  H2O_DRAFTS_NONE = 0,
  H2O_DRAFTS_LOOKUP = 1,  /* what followed earlier occurrences of the last tokens */
  H2O_DRAFTS_MODEL = 2,   /* what draft_model generates */
  H2O_DRAFTS_LOSSLESS = 3 /* what the model generates with the budget, hh, in a second cache; the
                             cache of the session keeps everything, and so does the output */
};

typedef struct h2o_session_options {
  size_t size;
  double hh;       /* budget of each sequence, layer and KV head: up to 1 a fraction of n_ctx, from
                      2 on a whole number of tokens; more than n_ctx, or 0: keep everything */
  double recent;   /* recent part of hh, likewise; negative: half of what n_sinks leaves */
  int32_t n_sinks; /* part of hh for the first tokens of the sequence */
  int32_t n_ctx;   /* the context in tokens, at most n_ctx_train; 0: n_ctx_train, up to 4096 */
  int32_t n_batch; /* prompt tokens per chunk, each followed by eviction; 0: 512, with CUDA 2048 */
  int32_t positions;     /* H2O_POSITIONS_* */
  const char* k_type;    /* type of cached keys: "f16", "f32", "bf16", "q8_0", "q5_0" (not on CUDA)
                            or "q4_0"; NULL: "f16" */
  const char* v_type;    /* type of cached values, likewise */
  uint64_t prefix_cache; /* of an engine: limit in bytes for states of prompts; 0: none. A prompt
                            with the same prefix as an earlier one continues from its state, with
                            the same output: after any token with a full cache on a CPU, otherwise
                            after a chunk of n_batch tokens */
  const char* archive;   /* keep evicted tokens in host memory, in a type as of k_type, or two,
                            "K,V", where "q3,q2" is the smallest; a sequence then ends at
                            n_ctx. NULL: evicted tokens are lost */
  int32_t archive_pages; /* pages of 16 archived tokens (with keys in q3: 32) that each token
                            attends to; 0: 0.75 * sqrt(n_ctx), 16 to 48 */
  float archive_heads;   /* share of the KV heads (of layers without a window) that have an
                            archive, those first in h2o.retrieval_heads; 0: all */
  const char* prefix_disk;    /* of an engine: a directory, created if missing, for states that
                                 leave prefix_cache, and for all when the engine ends. NULL: none */
  uint64_t prefix_disk_bytes; /* limit in bytes; 0: 4 GiB */
  const char* archive_dir; /* a directory for the archive instead of memory (CPU): an unnamed file
                              with disk space for n_ctx tokens from the start. NULL: in memory */
  const char* policy;      /* which tokens hh keeps: "h2o", "mean", "contribution", "window" or
                              another name in docs/evaluation.md, which replaces recent and n_sinks.
                              NULL: as "h2o", with these two */
  int32_t drafts;          /* H2O_DRAFTS_*; on the CPU, H2O_DRAFTS_LOSSLESS without an archive */
  int32_t draft_max;       /* the most guesses at once, of all requests, up to 1024; 0: 16, or 4
                              with recurrent layers, whose states each guess copies */
  h2o_model* draft_model;  /* of H2O_DRAFTS_MODEL: a smaller one with the same vocabulary, which may
                              be freed after the call */
  int32_t draft_tokens;    /* tokens that its cache keeps of each text; 0: 512 */
  int32_t reserved;        /* 0 */
} h2o_session_options;
/* clang-format off */
#define H2O_SESSION_OPTIONS \
  {sizeof(h2o_session_options), 0, -1, 0, 0, 0, 0, NULL, NULL, 0, NULL, 0, 0, NULL, 0, NULL, NULL, \
   0, 0, NULL, 0, 0}
/* clang-format on */

/* Opens a session without tokens, and allocates its cache. options may be NULL. Free *session
 * whatever this returns, as with h2o_model_load; it has the message of an error. */
H2O_API h2o_status h2o_session_open(h2o_model* model, const h2o_session_options* options,
                                    h2o_session** session) H2O_NOEXCEPT;

/* As h2o_model_free and h2o_model_error. Before freeing, cancel a running stream and wait for it.
 */
H2O_API h2o_status h2o_session_free(h2o_session* session) H2O_NOEXCEPT;
H2O_API const char* h2o_session_error(const h2o_session* session) H2O_NOEXCEPT;

/* Forgets all tokens, and a pending h2o_cancel. */
H2O_API h2o_status h2o_reset(h2o_session* session) H2O_NOEXCEPT;

/* Ends one call of h2o_stream, h2o_feed, h2o_decode, h2o_sample or h2o_logits, after its current
 * step: the call in progress, or else the next one, which then computes nothing. A cancel that
 * comes too late for the stream in progress has no effect on later calls. From any thread, and from
 * signal handlers; NULL is ignored. */
H2O_API void h2o_cancel(h2o_session* session) H2O_NOEXCEPT;

/* Forgets a h2o_cancel that has ended no call. A thread that cancels streams of another one may do
 * so just after a stream has ended: call this before the next one is started. From any thread; NULL
 * is ignored. */
H2O_API void h2o_clear_cancel(h2o_session* session) H2O_NOEXCEPT;

typedef struct h2o_logit_bias {
  int32_t token;
  float bias; /* added to its logit; -infinity bans the token */
} h2o_logit_bias;

enum { /* steps of sampling, in their default order */
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
  float repeat_penalty;  /* for the last repeat_last_n tokens; 1: none */
  int32_t repeat_last_n; /* -1: all tokens */
  int32_t seeded;        /* 1: the random numbers start from seed; 0: they continue, from a start
                            that differs in each session */
  uint64_t seed;
  float frequency_penalty; /* subtracted from the logits of these tokens, per occurrence */
  float presence_penalty;  /* subtracted from them once */
  float dry_multiplier;    /* a token that would extend a repetition of n tokens loses multiplier *
                              base^(n - allowed_length); 0: none */
  float dry_base;
  int32_t dry_allowed_length;
  int32_t dry_penalty_last_n; /* how many tokens back repetitions are searched; -1: the context */
  size_t n_dry_breakers;
  const char* const* dry_breakers; /* tokens that contain these strings end a repetition; NULL: line
                                      breaks, colons, quotes and asterisks */
  float typical_p;                 /* the most typical tokens of this probability; 1: all */
  float top_n_sigma;               /* logits up to this many deviations below the largest; 0: all */
  float xtc_probability; /* how often all tokens of at least probability xtc_threshold, except the
                            least likely of them, are left out */
  float xtc_threshold;
  float dynatemp_range; /* the temperature varies by up to this, by the entropy; 0: off */
  float dynatemp_exponent;
  int32_t mirostat; /* version 1 or 2, instead of all filters; 0: off */
  float mirostat_tau;
  float mirostat_eta;
  int32_t n_samplers;
  const int32_t* samplers; /* H2O_SAMPLER_*: only these, in this order; NULL: all */
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

/* Sets the sampling options; NULL: the defaults, as in a new session. */
H2O_API h2o_status h2o_set_sampling(h2o_session* session,
                                    const h2o_sampling* sampling) H2O_NOEXCEPT;

/* Called with each piece of text as it is generated: whole UTF-8 characters, never empty, followed
 * by a NUL. Returns 0 to continue; anything else ends the stream. It may call h2o_stats, h2o_kept,
 * h2o_tokens and h2o_cancel with the session. */
typedef int32_t (*h2o_piece_callback)(void* user, const char* piece, size_t n_bytes);

typedef struct h2o_stream_options {
  size_t size;
  int32_t max_tokens;      /* 0: n_ctx tokens; -1: until the model ends. A sequence whose positions
                              cannot roll ends at n_ctx */
  int32_t ignore_end;      /* 1: continue after tokens that end a text or a turn */
  int32_t parse_special;   /* 1: parse special tokens in the prompt, such as "</s>" */
  size_t n_stop;           /* number of stop strings */
  const char* const* stop; /* NUL-terminated; they end the output and are not part of it */
} h2o_stream_options;
#define H2O_STREAM_OPTIONS {sizeof(h2o_stream_options), 0, 0, 0, 0, NULL}

enum {
  H2O_FINISH_STOP = 1,     /* the model ended the text, or a stop string */
  H2O_FINISH_LENGTH = 2,   /* max_tokens, or the end of the context */
  H2O_FINISH_CANCELLED = 3 /* a cancel, a callback or an error */
};

typedef struct h2o_generation {
  size_t size;
  int32_t finish;        /* H2O_FINISH_*; 0: it runs */
  int32_t n_prompt;      /* tokens read before the first is generated */
  int32_t n_generated;   /* tokens generated */
  double prompt_seconds; /* for the prompt and the first token */
  double decode_seconds; /* for the tokens after the first */
  int32_t stop;          /* index of the stop string that ended the text; -1: none did */
  int32_t reserved;      /* 0 */
  int32_t n_evicted;     /* at the end: tokens before the first generated that no KV head keeps */
  int32_t n_archived;    /* of these, tokens in an archive, which may recall them */
  int32_t n_drafted;     /* tokens that were guessed, and of these, the right ones */
  int32_t n_accepted;
} h2o_generation;
#define H2O_GENERATION {sizeof(h2o_generation), 0, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0}

/* Adds the prompt to the sequence, then generates. The prompt may be empty if the sequence is not.
 * Prompt and generated tokens stay in the sequence, so that the next stream continues from there; a
 * token that ended the text does not. options and generation may be NULL.
 *
 * A cancelled stream returns H2O_OK; the next call that needs it reads the rest of the prompt.
 * After H2O_OUT_OF_MEMORY or H2O_INTERNAL_ERROR, the sequence may have more tokens than before:
 * h2o_tokens returns them, and h2o_stats how many of them are read. The text of the last may not
 * have reached the callback. */
H2O_API h2o_status h2o_stream(h2o_session* session, const char* prompt, size_t n_bytes,
                              const h2o_stream_options* options, h2o_piece_callback callback,
                              void* user, h2o_generation* generation) H2O_NOEXCEPT;

/* --- Token by token ------------------------------------------------------------------------- */

/* Adds tokens to the sequence and reads them. H2O_CANCELLED: all are added, but some may not be
 * read; the next call that needs them reads the rest. H2O_OUT_OF_MEMORY or H2O_INTERNAL_ERROR: the
 * same, or none is added; h2o_stats shows which. */
H2O_API h2o_status h2o_feed(h2o_session* session, const int32_t* tokens,
                            size_t n_tokens) H2O_NOEXCEPT;

/* Samples the next token. h2o_decode adds it. */
H2O_API h2o_status h2o_sample(h2o_session* session, int32_t* token) H2O_NOEXCEPT;

/* One step: h2o_feed of one token. */
H2O_API h2o_status h2o_decode(h2o_session* session, int32_t token) H2O_NOEXCEPT;

/* The logits after the last token [n_vocab], valid until the next call that changes the session. */
H2O_API h2o_status h2o_logits(h2o_session* session, const float** logits,
                              int32_t* n_vocab) H2O_NOEXCEPT;

/* --- What the cache holds ------------------------------------------------------------------- */

typedef struct h2o_session_stats {
  size_t size;
  int32_t n_tokens;  /* tokens of the sequence */
  int32_t n_read;    /* tokens that the model has processed */
  int32_t n_kept;    /* tokens kept per KV head, in the layer that keeps most */
  int32_t n_evicted; /* n_read - n_kept */
  int32_t n_ctx;
  int32_t room;              /* how many more tokens fit */
  uint64_t cache_bytes;      /* allocated, all layers */
  uint64_t full_cache_bytes; /* what a full cache of n_ctx tokens would allocate */
  uint64_t archive_bytes;    /* size of the archive */
} h2o_session_stats;
#define H2O_SESSION_STATS {sizeof(h2o_session_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0}

H2O_API h2o_status h2o_stats(h2o_session* session, h2o_session_stats* stats) H2O_NOEXCEPT;

/* Positions in the sequence of the tokens that one KV head of a layer keeps, ascending, and their
 * scores (0 if the cache keeps none). scores may be NULL. */
H2O_API h2o_status h2o_kept(h2o_session* session, int32_t layer, int32_t kv_head,
                            int32_t* positions, float* scores, size_t capacity,
                            size_t* n_kept) H2O_NOEXCEPT;

/* The tokens of the sequence. */
H2O_API h2o_status h2o_tokens(h2o_session* session, int32_t* tokens, size_t capacity,
                              size_t* n_tokens) H2O_NOEXCEPT;

/* --- Snapshots ------------------------------------------------------------------------------ */

/* The tokens, the cache and the random numbers as bytes, for one model and one set of session
 * options. Free them with h2o_snapshot_free. The Python package has the same format. */
H2O_API h2o_status h2o_snapshot_save(h2o_session* session, void** bytes,
                                     size_t* n_bytes) H2O_NOEXCEPT;
H2O_API void h2o_snapshot_free(void* bytes) H2O_NOEXCEPT;

/* The session continues bit for bit as the saved one would have; its sampling options stay.
 * H2O_BAD_FORMAT: the bytes are damaged, or of another model or other options. */
H2O_API h2o_status h2o_snapshot_load(h2o_session* session, const void* bytes,
                                     size_t n_bytes) H2O_NOEXCEPT;

/* --- Many requests at once ------------------------------------------------------------------ */

/* Opens an engine that computes up to max_sequences requests at a time, and allocates their caches;
 * further requests wait. Each gives the text that a session with the same options would. options
 * may be NULL. Free *engine whatever this returns, as with h2o_model_load. */
H2O_API h2o_status h2o_engine_open(h2o_model* model, const h2o_session_options* options,
                                   int32_t max_sequences, h2o_engine** engine) H2O_NOEXCEPT;

/* Ends all requests, after the current step, and frees their caches, but not the requests' handles.
 * No other call with the engine may be in progress; calls with its requests may. */
H2O_API h2o_status h2o_engine_free(h2o_engine* engine) H2O_NOEXCEPT;

/* Why h2o_engine_open failed; "" if it did not. */
H2O_API const char* h2o_engine_error(const h2o_engine* engine) H2O_NOEXCEPT;

typedef struct h2o_engine_info {
  size_t size;
  int32_t n_sequences; /* max_sequences */
  int32_t n_active;    /* requests that are being computed */
  int32_t n_waiting;   /* requests that wait for a sequence */
  int32_t n_ctx;
  uint64_t cache_bytes;      /* allocated, all sequences */
  uint64_t prompt_tokens;    /* prompt tokens read so far, of all requests */
  uint64_t generated_tokens; /* tokens generated so far */
  uint64_t cached_tokens;    /* prompt tokens that came from the prefix cache */
  uint64_t prefix_bytes;     /* size of the prefix cache */
  uint64_t drafted_tokens;   /* guessed, and of these, the right ones */
  uint64_t accepted_tokens;
} h2o_engine_info;
#define H2O_ENGINE_INFO {sizeof(h2o_engine_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

H2O_API h2o_status h2o_engine_describe(h2o_engine* engine, h2o_engine_info* info) H2O_NOEXCEPT;

/* Sets the tokens that may come next: token i is bit i % 32 of allowed[i / 32]; all bits are 0
 * before. tokens: all so far, of the prompt and generated. For the output to end, a token that ends
 * it must be allowed. Returns 0 to continue; after anything else the request ends with
 * H2O_CANCELLED. It runs in a computing thread, of the engine or in h2o_request_next, and must not
 * wait for it: h2o_request_next, h2o_request_free and h2o_engine_free return H2O_BUSY there. */
typedef int32_t (*h2o_constraint_callback)(void* user, const int32_t* tokens, size_t n_tokens,
                                           uint32_t* allowed, size_t n_words);

typedef struct h2o_request_options {
  size_t size;
  const h2o_sampling* sampling;     /* NULL: the defaults; without a seed, all requests differ */
  const h2o_stream_options* limits; /* NULL: the defaults */
  const int32_t* tokens;            /* the prompt as tokens, instead of text */
  size_t n_tokens;
  h2o_constraint_callback constraint; /* NULL: all tokens are allowed */
  void* user;                         /* passed to it, until the request has ended or is freed */
  int32_t n_top;         /* log-probabilities of each token and of the n_top likeliest; -1: none */
  int32_t reserved;      /* 0 */
  int32_t protect_first; /* the first tokens of the prompt, and */
  int32_t protect_last;  /* the last ones, that are never evicted; inside the budget */
} h2o_request_options;
#define H2O_REQUEST_OPTIONS \
  {sizeof(h2o_request_options), NULL, NULL, NULL, 0, NULL, NULL, -1, 0, 0, 0}

/* Submits a request, which threads of the engine compute from now on; any thread may submit any
 * number. Text is tokenized as the beginning of a sequence. options may be NULL; what it points to
 * need only be valid until the call returns, except `user`. Free *request whatever this returns; it
 * has the message of an error. */
H2O_API h2o_status h2o_engine_submit(h2o_engine* engine, const char* prompt, size_t n_bytes,
                                     const h2o_request_options* options,
                                     h2o_request** request) H2O_NOEXCEPT;

/* Waits for the next piece of text: whole characters, followed by a NUL, valid until the next call
 * with the request. At the end *n_bytes is 0 and *piece NULL. Returns the error that ended the
 * request, once. */
H2O_API h2o_status h2o_request_next(h2o_request* request, const char** piece,
                                    size_t* n_bytes) H2O_NOEXCEPT;

/* As h2o_request_next, but does not wait: returns all text that is ready, or none. */
H2O_API h2o_status h2o_request_poll(h2o_request* request, const char** piece,
                                    size_t* n_bytes) H2O_NOEXCEPT;

/* Ends the request after the current step. From any thread; NULL is ignored. */
H2O_API void h2o_request_cancel(h2o_request* request) H2O_NOEXCEPT;

/* Ends the request, waits for the current step, and frees the handle. NULL is ignored. H2O_BUSY: a
 * call with the handle is in progress, and nothing was freed. */
H2O_API h2o_status h2o_request_free(h2o_request* request) H2O_NOEXCEPT;
H2O_API const char* h2o_request_error(const h2o_request* request) H2O_NOEXCEPT;

/* The finish reason and statistics so far; finish is 0 until the request has ended. */
H2O_API h2o_status h2o_request_result(h2o_request* request,
                                      h2o_generation* generation) H2O_NOEXCEPT;

/* All text and all tokens generated so far; text and capacity as for h2o_detokenize. */
H2O_API h2o_status h2o_request_text(h2o_request* request, char* text, size_t capacity,
                                    size_t* n_bytes) H2O_NOEXCEPT;
H2O_API h2o_status h2o_request_tokens(h2o_request* request, int32_t* tokens, size_t capacity,
                                      size_t* n_tokens) H2O_NOEXCEPT;

typedef struct h2o_logprob {
  int32_t token;
  float logprob; /* natural logarithm, of the model's distribution before all sampling options */
} h2o_logprob;

/* The log-probability of the i-th generated token, and the n_top likeliest, likeliest first. */
H2O_API h2o_status h2o_request_logprobs(h2o_request* request, size_t i, h2o_logprob* logprob,
                                        h2o_logprob* top, size_t capacity,
                                        size_t* n_top) H2O_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif /* H2O_H */
