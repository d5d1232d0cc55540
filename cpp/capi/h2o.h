/* h2o.h: language models with a bounded, heavy-hitter KV cache, for applications. Text in, text
 * out.
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
 * Memory. The cache, the activations and the logits of a session are allocated when it is opened, and
 * do not grow. What grows is the list of its tokens, which each call that generates or reads copies:
 * some 4 bytes a token and copy (4 more if all of them count as repeated), freed with the next call.
 *
 * Handles. A handle belongs to one thread at a time; only h2o_cancel may be called at any time,
 * from any thread. A call that finds another one at work with the same handle returns H2O_BUSY and
 * does nothing. Different handles are independent: sessions of one model take turns by themselves,
 * and a model may be freed before its sessions.
 *
 * Errors. A call returns H2O_OK or says what went wrong; h2o_model_error and h2o_session_error then
 * tell more, in UTF-8, until the next call with that handle. A call that failed has changed
 * nothing, unless it says otherwise. Arguments are checked: NULL where it makes no sense, and sizes
 * and numbers out of range, are H2O_INVALID_ARGUMENT. No call throws, prints or ends the process.
 *
 * Structures begin with their size, so that fields can be added: initialise each with the macro of
 * its name. What is added later is as if it had its default.
 *
 * Text is UTF-8, given by pointer and number of bytes; it need not end with NUL. NULL is the empty
 * text if the number is 0. Tokens are numbers below n_vocab.
 *
 * Results of unknown size go to an array of `capacity` elements that the caller has: their number
 * is always stored, and if it is larger than the capacity nothing else is, and H2O_TOO_SMALL
 * returned.
 */
#ifndef H2O_H
#define H2O_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define H2O_API __attribute__((visibility("default")))
#else
#define H2O_API
#endif

#ifdef __cplusplus
#define H2O_NOEXCEPT noexcept
extern "C" {
#else
#define H2O_NOEXCEPT
#endif

/* Programs built with one value work with every library that has the same. */
#define H2O_ABI_VERSION 1
H2O_API uint32_t h2o_abi_version(void) H2O_NOEXCEPT; /* the library's */
H2O_API const char* h2o_version(void) H2O_NOEXCEPT;  /* of the library, "0.1.0" */

typedef struct h2o_model h2o_model;     /* a GGUF file made ready, with its tokenizer */
typedef struct h2o_session h2o_session; /* a text, and the cache that remembers it */

typedef int32_t h2o_status;
enum {
  H2O_OK = 0,
  H2O_INVALID_ARGUMENT = 1,
  H2O_CANNOT_OPEN = 2, /* a file */
  H2O_BAD_FORMAT = 3,  /* a file or a snapshot is not what it should be */
  H2O_OUT_OF_MEMORY = 4,
  H2O_CONTEXT_FULL = 5, /* the text has no room for so many tokens */
  H2O_CANCELLED = 6,
  H2O_TOO_SMALL = 7, /* the capacity */
  H2O_BUSY = 8,      /* another call is at work with this handle; it has no message of its own */
  H2O_INTERNAL_ERROR = 9
};
H2O_API const char* h2o_status_text(h2o_status status) H2O_NOEXCEPT;

/* --- Models -------------------------------------------------------------------------------- */

typedef struct h2o_model_options {
  size_t size;
  const char* device; /* "auto", "cpu", "cuda" or "cuda:N"; NULL: "auto" */
  int32_t n_threads;  /* of the CPU; 0: one for each core */
  int32_t reserved;   /* 0 */
} h2o_model_options;
#define H2O_MODEL_OPTIONS {sizeof(h2o_model_options), NULL, 0, 0}

/* Loads a GGUF file. options may be NULL. Whatever it returns, *model is then a handle to be freed:
 * after an error it only has the message, and is NULL where memory did not suffice for that. */
H2O_API h2o_status h2o_model_load(const char* path, const h2o_model_options* options,
                                  h2o_model** model) H2O_NOEXCEPT;

/* Frees a handle, and the model when its sessions are freed too; their threads end with it. NULL is
 * ignored. H2O_BUSY: a call is at work with it, and nothing was freed. */
H2O_API h2o_status h2o_model_free(h2o_model* model) H2O_NOEXCEPT;

/* What was wrong with the last call; "" if nothing was. */
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
  int32_t bos; /* the tokens that begin and end a text; -1: there is none */
  int32_t eos;
} h2o_model_info;
#define H2O_MODEL_INFO {sizeof(h2o_model_info), NULL, NULL, 0, 0, 0, 0, 0, 0, 0, 0}

H2O_API h2o_status h2o_describe(h2o_model* model, h2o_model_info* info) H2O_NOEXCEPT;

/* --- Text and tokens ------------------------------------------------------------------------ */

enum {
  H2O_ADD_SPECIAL = 1,   /* with the tokens that the model wants at the ends of a text */
  H2O_PARSE_SPECIAL = 2, /* special tokens that the text spells, as "</s>", are those tokens */
  H2O_CONTINUES = 4      /* it continues another text: no space is put in front of it */
};

/* The tokens of a text. flags: any of the above, added. */
H2O_API h2o_status h2o_tokenize(h2o_model* model, const char* text, size_t n_bytes, uint32_t flags,
                                int32_t* tokens, size_t capacity, size_t* n_tokens) H2O_NOEXCEPT;

/* The text of tokens. It always is UTF-8: other bytes become U+FFFD. A NUL follows it, which
 * *n_bytes does not count and `capacity` must have room for. */
H2O_API h2o_status h2o_detokenize(h2o_model* model, const int32_t* tokens, size_t n_tokens,
                                  char* text, size_t capacity, size_t* n_bytes) H2O_NOEXCEPT;

/* Whether a token ends a text or a turn: 1 or 0, also for what is no token. */
H2O_API int32_t h2o_is_end(const h2o_model* model, int32_t token) H2O_NOEXCEPT;

/* --- Sessions ------------------------------------------------------------------------------- */

enum {
  H2O_POSITIONS_AUTO = 0, /* original up to the trained length, then rolling if the cache evicts */
  H2O_POSITIONS_ORIGINAL = 1, /* where tokens are in the text, which ends at n_ctx */
  H2O_POSITIONS_ROLLING = 2   /* ranks in the cache: the text may go on for ever */
};

typedef struct h2o_session_options {
  size_t size;
  double hh;       /* what the cache keeps of a text, for each layer and KV head: up to 1 a fraction
                      of n_ctx (1: all of it), from 2 on a whole number of tokens; 0: everything */
  double recent;   /* how much of hh is recent tokens, likewise; negative: half of it */
  int32_t n_sinks; /* how many of hh are the first tokens of the text, besides */
  int32_t n_ctx;   /* the context; 0: as trained, which is the most */
  int32_t n_batch; /* prompt tokens that are read at a time, with eviction after each time */
  int32_t positions;
  const char* k_type; /* of the cached keys: "f16", "f32", "bf16", "q8_0", "q4_0"; NULL: "f16" */
  const char* v_type; /* and values */
} h2o_session_options;
#define H2O_SESSION_OPTIONS {sizeof(h2o_session_options), 0, -1, 0, 0, 512, 0, NULL, NULL}

/* Opens a session with an empty text, and allocates its cache. options may be NULL. *session is to
 * be freed whatever it returns, as with h2o_model_load; an error is also told by the session. */
H2O_API h2o_status h2o_session_open(h2o_model* model, const h2o_session_options* options,
                                    h2o_session** session) H2O_NOEXCEPT;

/* As h2o_model_free and h2o_model_error. A running stream is to be cancelled and waited for. */
H2O_API h2o_status h2o_session_free(h2o_session* session) H2O_NOEXCEPT;
H2O_API const char* h2o_session_error(const h2o_session* session) H2O_NOEXCEPT;

/* Forgets the text, and a cancel that has ended nothing yet. */
H2O_API h2o_status h2o_reset(h2o_session* session) H2O_NOEXCEPT;

/* Ends one call of h2o_stream, h2o_feed, h2o_decode, h2o_sample or h2o_logits, after the step that
 * it is at: the one that is at work with the session, or else the next one, which then does not
 * begin to compute. So it is not lost, whichever comes first; but a stream that is over takes what
 * came too late for it along. From any thread, and from signal handlers; NULL is ignored. */
H2O_API void h2o_cancel(h2o_session* session) H2O_NOEXCEPT;

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
} h2o_sampling;
#define H2O_SAMPLING {sizeof(h2o_sampling), 0.8f, 40, 0.95f, 0.05f, 1.0f, 64, 0, 0}

/* How tokens are chosen from now on; NULL: by the defaults, as in a new session. */
H2O_API h2o_status h2o_set_sampling(h2o_session* session,
                                    const h2o_sampling* sampling) H2O_NOEXCEPT;

/* Called with each piece of text as it is generated: whole characters of UTF-8, never empty, with a
 * NUL behind. Returns 0 to go on; anything else ends the stream. It may call h2o_stats, h2o_kept,
 * h2o_tokens and h2o_cancel with the session. */
typedef int32_t (*h2o_piece_callback)(void* user, const char* piece, size_t n_bytes);

typedef struct h2o_stream_options {
  size_t size;
  int32_t max_tokens;      /* 0: until the end of text, or of the context if it has one */
  int32_t ignore_end;      /* 1: go on after tokens that end the text */
  int32_t parse_special;   /* 1: special tokens that the prompt spells are those tokens */
  size_t n_stop;           /* number of */
  const char* const* stop; /* strings that end the text and are not part of it, each with a NUL */
} h2o_stream_options;
#define H2O_STREAM_OPTIONS {sizeof(h2o_stream_options), 0, 0, 0, 0, NULL}

enum {
  H2O_FINISH_STOP = 1,     /* the end of text, or a stop string */
  H2O_FINISH_LENGTH = 2,   /* max_tokens, or the end of the context */
  H2O_FINISH_CANCELLED = 3 /* by h2o_cancel or by the callback */
};

typedef struct h2o_generation {
  size_t size;
  int32_t finish;
  int32_t n_prompt;    /* tokens read before the first was generated */
  int32_t n_generated; /* tokens generated */
  double prompt_seconds;
  double decode_seconds; /* for the tokens after the first, which comes with the prompt */
} h2o_generation;
#define H2O_GENERATION {sizeof(h2o_generation), 0, 0, 0, 0, 0}

/* Continues the text: adds the prompt, then generates. The prompt may be empty where there is a
 * text to go on from. Prompt and generated tokens are then part of the text, so that the next
 * stream goes on from there; a token that ended it is not. options and generation may be NULL.
 *
 * A stream that was cancelled returns H2O_OK; what is left of a prompt that it was reading is read
 * by the next call that needs it. After H2O_OUT_OF_MEMORY or H2O_INTERNAL_ERROR the text has the
 * tokens that h2o_tokens gives, which may be more than before: h2o_stats tells how many, and how
 * many of them are read; the text of the last may not have gone to the callback. */
H2O_API h2o_status h2o_stream(h2o_session* session, const char* prompt, size_t n_bytes,
                              const h2o_stream_options* options, h2o_piece_callback callback,
                              void* user, h2o_generation* generation) H2O_NOEXCEPT;

/* --- Token by token ------------------------------------------------------------------------- */

/* Adds tokens to the sequence and reads them. H2O_CANCELLED: they are part of it, but some may not
 * have been read; the next call that needs it reads the rest. After H2O_OUT_OF_MEMORY or
 * H2O_INTERNAL_ERROR the same, or none has been added: h2o_stats tells. */
H2O_API h2o_status h2o_feed(h2o_session* session, const int32_t* tokens,
                            size_t n_tokens) H2O_NOEXCEPT;

/* Chooses the token after the text. It becomes part of it with h2o_decode. */
H2O_API h2o_status h2o_sample(h2o_session* session, int32_t* token) H2O_NOEXCEPT;

/* One step: h2o_feed of one token. */
H2O_API h2o_status h2o_decode(h2o_session* session, int32_t token) H2O_NOEXCEPT;

/* The logits after the text [n_vocab], until the next call that changes it. */
H2O_API h2o_status h2o_logits(h2o_session* session, const float** logits,
                              int32_t* n_vocab) H2O_NOEXCEPT;

/* --- What the cache holds ------------------------------------------------------------------- */

typedef struct h2o_session_stats {
  size_t size;
  int32_t n_tokens;  /* of the text */
  int32_t n_read;    /* of them, those that have been through the model */
  int32_t n_kept;    /* of those, by the layer that keeps most, in each KV head */
  int32_t n_evicted; /* n_read - n_kept */
  int32_t n_ctx;
  int32_t room;              /* how many more tokens can be read */
  uint64_t cache_bytes;      /* allocated, all layers */
  uint64_t full_cache_bytes; /* what the cache of all n_ctx tokens would take */
} h2o_session_stats;
#define H2O_SESSION_STATS {sizeof(h2o_session_stats), 0, 0, 0, 0, 0, 0, 0, 0}

H2O_API h2o_status h2o_stats(h2o_session* session, h2o_session_stats* stats) H2O_NOEXCEPT;

/* The positions in the text of the tokens that one KV head of a layer keeps, ascending, and the
 * attention that each has received (0 where the cache keeps no scores). scores may be NULL. */
H2O_API h2o_status h2o_kept(h2o_session* session, int32_t layer, int32_t kv_head,
                            int32_t* positions, float* scores, size_t capacity,
                            size_t* n_kept) H2O_NOEXCEPT;

/* The tokens of the text. */
H2O_API h2o_status h2o_tokens(h2o_session* session, int32_t* tokens, size_t capacity,
                              size_t* n_tokens) H2O_NOEXCEPT;

/* --- Snapshots ------------------------------------------------------------------------------ */

/* The text, its cache and its random numbers as bytes, to be freed with h2o_snapshot_free. They go
 * with one model and one set of session options; the Python package writes and reads the same. */
H2O_API h2o_status h2o_snapshot_save(h2o_session* session, void** bytes,
                                     size_t* n_bytes) H2O_NOEXCEPT;
H2O_API void h2o_snapshot_free(void* bytes) H2O_NOEXCEPT;

/* The session goes on as the one that was saved would have, bit for bit, from the logits on; the
 * options of sampling are its own. H2O_BAD_FORMAT: the bytes are damaged, or of another model or
 * options. */
H2O_API h2o_status h2o_snapshot_load(h2o_session* session, const void* bytes,
                                     size_t n_bytes) H2O_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif /* H2O_H */
