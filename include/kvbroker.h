/* kvbroker.h: the KV cache of an inference engine, held by a broker. C11; C++11 and later may include it too.
 *
 * IN SHORT
 *
 *   kvb_client *client;                     one per process: a connection, or a pool of the process's own
 *   kvb_profile *profile;                   one per model: how many bytes a token takes in each layer
 *   kvb_session *session;                   one per token sequence: its block table
 *
 *   kvb_connect(NULL, NULL, &client);
 *   kvb_profile_new(client, &geometry, &profile);
 *   kvb_session_open(profile, &options, &session);
 *   held = kvb_session_attach(session, ids, n);   tokens whose KV is there already (a shared prefix)
 *   kvb_session_ensure(session, n);               room for all n tokens; may be refused, before anything is written
 *   ... write the rows of tokens held to n, run attention ...
 *   kvb_session_seal(session, ids, n);            whole blocks can be shared from now on
 *
 * RETURN VALUES
 *   Functions that return int give 0, those that return int64_t a count from 0; both give a negative KVB_ERR_ code
 *   when they fail. A call that fails has changed nothing and has not written through its out parameters. The words and
 *   numbers of a thread's last failure: kvb_last_error, kvb_last_error_info. Success leaves them as they are.
 *   The codes are not errno numbers; where the kernel said no, its errno is in kvb_error.os_error.
 *
 * HANDLES AND MEMORY
 *   A handle belongs to the caller until its close call, which takes NULL too. Handles may be closed in any order: the
 *   connection ends with the last handle that came from it. Using a closed handle is undefined, as with free().
 *   Strings and structures that are passed in belong to the caller and are not kept. Strings that come back as
 *   const char * are static. Strings are UTF-8 with a zero byte at the end; labels of more than 32 bytes are cut.
 *   Buffers that are passed in are the caller's own memory: never an address inside the pool (kvb_row, kvb_view).
 *
 * THE BROKER
 *   It is trusted with what memory holds, not with the shape of its messages: a broken answer is KVB_ERR_PROTOCOL, and the
 *   connection is over then (KVB_ERR_LOST). Only a broker that cuts memory short after it has handed it over, where the kind
 *   of memory has no seals against that, ends the program that touches it (SIGBUS).
 *
 * STRUCTURES WITH A SIZE
 *   Set `size` to sizeof the structure and the rest to zero (KVB_INIT does both), then the fields that matter: zero
 *   always means the default. A program built against an older header than the library works unchanged: fields that it
 *   does not have are taken as zero, and are not written. One built against a newer header works as long as what the
 *   library does not know is zero; otherwise KVB_ERR_UNSUPPORTED. In structures that it fills in, what it does not know
 *   becomes zero.
 *
 * THREADS
 *   A client, and a profile, may be used by several threads at once. A session, a window too, is used by one thread at a
 *   time; only functions that take a const kvb_session *, and reading rows, may run beside each other. Two calls that may
 *   not meet give KVB_ERR_IN_USE to the second; a close must not run beside any other call on the same handle.
 *   The library starts no thread and never calls back into the program. It installs no signal handler.
 *   A call that asks the broker waits up to the client's timeout, and then gives KVB_ERR_TIMEOUT.
 *
 * FORK
 *   A child made by fork() has no part in its parent's handles: every call with one gives KVB_ERR_FORKED and does
 *   nothing, close calls too, and the pool is not mapped there (touching a row is SIGSEGV). The child makes a client of
 *   its own, or executes another program: all descriptors are close-on-exec. A child that does neither keeps the
 *   parent's descriptors open until it exits, and with them the memory that they stand for.
 *
 * PANICS
 *   A defect inside the library gives KVB_ERR_INTERNAL, not the end of the program.
 */
#ifndef KVBROKER_H
#define KVBROKER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define KVB_API __attribute__((visibility("default")))
#define KVB_MUST_CHECK __attribute__((warn_unused_result))
#else
#define KVB_API
#define KVB_MUST_CHECK
#endif

/* ------------------------------------------------------------------------------------------------ versions --- */

/* Version of this header's ABI. It grows when something is added; what is there stays as it is. */
#define KVB_ABI_VERSION 1

/* The library's ABI version. A program that needs what version N brought checks for at least N. */
KVB_API uint32_t kvb_abi_version(void);

/* The library's version, such as "0.1.0". Static. */
KVB_API const char *kvb_version(void);

/* -------------------------------------------------------------------------------------------------- errors --- */

enum {
    KVB_OK = 0,
    KVB_ERR_INVALID = -1,           /* the caller's mistake: NULL, out of range, not in this order */
    KVB_ERR_NOT_REACHABLE = -2,     /* nobody listens at the socket, or takes connections there in time (os_error) */
    KVB_ERR_LOST = -3,              /* the connection is over: what sessions hold stays readable and writable, nothing grows */
    KVB_ERR_TIMEOUT = -4,           /* no answer in time; blocks that come late become credit */
    KVB_ERR_PROTOCOL = -5,          /* the broker's answer makes no sense, or what answers is no broker: nothing of it is used */
    KVB_ERR_MAP = -6,               /* the kernel would not map memory (os_error) */
    KVB_ERR_TOO_MANY_MAPPINGS = -7, /* a view needs `needed` mappings, `available` are left (vm.max_map_count) */
    KVB_ERR_FORKED = -8,            /* the handle is the parent process's */
    KVB_ERR_NO_MEMORY = -9,         /* the embedded pool could not be allocated (os_error) */
    KVB_ERR_INTERNAL = -10,         /* a defect of the library */
    KVB_ERR_IN_USE = -11,           /* another thread uses this session, window or scratch just now */
    KVB_ERR_UNSUPPORTED = -12,      /* this library, or an embedded broker, cannot do that */
    /* The broker refuses. `needed` and `available` are in the unit that the text names. */
    KVB_ERR_NEVER_FITS = -101,      /* larger than the pool, or the tenant's limit, will ever be: the plan is wrong */
    KVB_ERR_BUSY = -102,            /* not now: others hold what it needs. Close, trim, or try again later */
    KVB_ERR_OVER_LIMIT = -103,      /* a limit that the operator has set */
    KVB_ERR_STALE = -104,           /* it names something that has gone */
    KVB_ERR_BAD_REQUEST = -105,     /* the broker calls the request wrong: a misuse, such as pinning what is not sealed */
    KVB_ERR_BROKER_FAULT = -106,    /* the broker's own fault */
    KVB_ERR_SESSION_LOST = -107     /* the session was ended for one of higher priority: what it wrote may be gone. Close it */
};

/* Starts a structure: kvb_stats stats = KVB_INIT(kvb_stats); In C++: kvb_stats stats = {}; stats.size = sizeof stats; */
#define KVB_INIT(type) { .size = sizeof(type) }

/* The name of a code, such as "never-fits"; "unknown" for numbers that are none. Static. */
KVB_API const char *kvb_error_name(int code);

/* The words of this thread's last failure: what happened, to which object, and what to do. Copies at most `size` bytes,
 * always with a zero byte at the end (text may be NULL with size 0). Returns the length of the whole text without the
 * zero byte; 0 when nothing has failed. */
KVB_API size_t kvb_last_error(char *text, size_t size);

typedef struct kvb_error {
    size_t size;
    int32_t code;       /* what the call returned; 0 when nothing has failed */
    int32_t os_error;   /* errno, where the kernel said no; else 0 */
    uint64_t needed;    /* what a refused request needed; 0 where the refusal says nothing */
    uint64_t available; /* what there was */
} kvb_error;

/* The numbers of this thread's last failure. Does not count as a call: it leaves them as they are unless `out` is
 * wrong. */
KVB_API int kvb_last_error_info(kvb_error *out);

/* ------------------------------------------------------------------------------------------------- clients --- */

typedef struct kvb_client kvb_client;
typedef struct kvb_profile kvb_profile;
typedef struct kvb_session kvb_session;

/* credit_ahead: no blocks ahead of need. */
#define KVB_NO_CREDIT_AHEAD UINT32_MAX

typedef struct kvb_client_options {
    size_t size;
    const char *label;     /* the program's name for the operator; NULL: the executable's */
    uint32_t timeout_ms;   /* the longest that a call waits for the broker; 0: 5000 */
    uint32_t credit_ahead; /* blocks to have ahead of need per profile; 0: 1, with which a decoding session finds its
                              next block there already; KVB_NO_CREDIT_AHEAD for none */
} kvb_client_options;

/* Connects to the broker at `socket`. With NULL: at KVBROKER_SOCKET if it is set and not empty, else at
 * /run/kvbroker/kvbroker.sock; and with KVBROKER_BACKEND=embedded in the environment a pool of this process's own instead, of the default sizes.
 * `options` may be NULL. The environment is read during the call: no other thread may change it meanwhile.
 * Errors: NOT_REACHABLE, INVALID, TIMEOUT, BAD_REQUEST (another protocol version; a uid that can be no tenant),
 * OVER_LIMIT (as many connections as there may be, of this uid or in all), PROTOCOL (what answers there is no broker of
 * this version), MAP. */
KVB_API KVB_MUST_CHECK int kvb_connect(const char *socket, const kvb_client_options *options, kvb_client **out);

typedef struct kvb_embedded_options {
    size_t size;
    uint64_t pool_bytes;   /* 0: 256 MiB; rounded down to whole extents */
    uint64_t extent_bytes; /* 0: 3 MiB; whole pages, and at least one block of every profile */
} kvb_embedded_options;

/* A pool of this process's own, over memfd: nothing needs to be installed. Every call makes a pool of its own. All of
 * its memory is taken now. Either pointer to options may be NULL. Errors: INVALID, NO_MEMORY, MAP. */
KVB_API KVB_MUST_CHECK int kvb_embedded(const kvb_embedded_options *embedded, const kvb_client_options *options,
                                        kvb_client **out);

/* Ends the handle. The connection ends when its profiles and sessions are closed too. */
KVB_API int kvb_client_close(kvb_client *client);

enum { KVB_BACKEND_DMA_HEAP = 1, KVB_BACKEND_MEMFD = 2, KVB_BACKEND_UDMABUF = 4 };

typedef struct kvb_client_info {
    size_t size;
    uint64_t instance;     /* tells one run of the broker from another */
    uint64_t extent_bytes; /* bytes of one extent: what one descriptor stands for */
    uint32_t extents;      /* extents in the pool */
    uint32_t tenant;       /* the trust domain that the broker counts this process in: its uid */
    uint32_t backend;      /* KVB_BACKEND_ */
    uint32_t embedded;     /* 1: the pool is this process's own */
} kvb_client_info;

/* What the broker said at the start. Asks nobody. */
KVB_API int kvb_client_get_info(const kvb_client *client, kvb_client_info *out);

/* The descriptor to wait on for reading (poll, epoll): when it is readable, or has hung up, call kvb_client_poll. It
 * stays the client's: do not read, write or close it. UNSUPPORTED for an embedded broker. */
KVB_API int kvb_client_event_fd(const kvb_client *client);

/* Takes in what the broker has to say, without waiting: an extent that it wants back, a late answer. Every call that
 * asks the broker does that too; a program that makes none for long calls this when the descriptor is readable, or now
 * and then: what the broker asks back and does not get is missing for others. Errors: LOST when the broker has gone (then
 * stop waiting on the descriptor), TIMEOUT, MAP. */
KVB_API int kvb_client_poll(kvb_client *client);

/* ------------------------------------------------------------------------------------------------ profiles --- */

/* The order of rows inside a block. */
enum {
    KVB_PLANE_MAJOR = 0, /* [layer][K|V][token][row]: what kernels, NPU tiles and views want */
    KVB_TOKEN_MAJOR = 1  /* [token][layer][K|V][row] */
};

/* Which plane of a layer. */
enum { KVB_K = 0, KVB_V = 1 };

/* One layer: bytes of one token's K row and V row. v_row may be 0 (a latent cache keeps everything in K). */
typedef struct kvb_layer {
    uint32_t number; /* the layer's number in the model, for people; ascending. Calls take the index in `rows` */
    uint32_t k_row;
    uint32_t v_row;
} kvb_layer;

typedef struct kvb_geometry {
    size_t size;
    const char *name;          /* the model's, for people */
    const char *element;       /* the element type, for people: "f16" */
    const kvb_layer *rows;     /* `layers` of them, where layers differ; NULL: all have k_row and v_row */
    uint32_t layers;           /* 1 to 1024 */
    uint32_t k_row;            /* bytes; 0 with rows */
    uint32_t v_row;            /* bytes; 0 with rows */
    uint32_t tokens_per_block; /* a power of two, up to 65536 */
    uint32_t layout;           /* KVB_PLANE_MAJOR, KVB_TOKEN_MAJOR */
    uint32_t window;           /* sliding window of all layers in tokens, the token itself counted in; 0: none */
    const uint32_t *windows;   /* `layers` of them, where layers differ (0: none), and `window` is 0; NULL: all alike */
} kvb_geometry;

/* Layers with a window are kept no longer than it reaches: as a session grows, whole blocks that no token still to come
 * reads go back. Layers with the same window are a group with a block table of its own; all groups of a model draw on the
 * same memory, and every call on a session is about all of them. */

/* Registers a geometry. The same one twice is the same one. Programs that share prefixes give the same names too.
 * Errors: INVALID, NEVER_FITS (a block of `needed` bytes, an extent of `available`), OVER_LIMIT, LOST, TIMEOUT. */
KVB_API KVB_MUST_CHECK int kvb_profile_new(kvb_client *client, const kvb_geometry *geometry, kvb_profile **out);

/* The same for a model: `path` is a Hugging Face config.json, a directory with one, or a GGUF file, of which only the
 * header is read. kv_type: "f16" (also for NULL), "f32", "q8_0" and so on. tokens_per_block: 0 is 16. */
KVB_API KVB_MUST_CHECK int kvb_profile_from_model(kvb_client *client, const char *path, const char *kv_type,
                                                  uint32_t tokens_per_block, kvb_profile **out);

/* Ends the handle; sessions of it live on. */
KVB_API int kvb_profile_close(kvb_profile *profile);

typedef struct kvb_profile_info {
    size_t size;
    uint64_t slot_bytes;      /* bytes that a block takes in the pool, whole pages; with several groups, one of each */
    uint64_t bytes_per_token; /* K and V of all layers */
    uint32_t layers;
    uint32_t tokens_per_block;
    uint32_t shift; /* log2 of tokens_per_block */
    uint32_t layout;
    uint32_t groups; /* layers by their window: 1 when all are alike */
    uint32_t reserved;
} kvb_profile_info;

/* The geometry as registered. Asks nobody. */
KVB_API int kvb_profile_get_info(const kvb_profile *profile, kvb_profile_info *out);

/* Where a plane lies in every block of its layer's group, in bytes: the same for all sessions, for ever. No size in front. */
typedef struct kvb_plane {
    size_t offset; /* from the block's start to its first token's row */
    size_t stride; /* from one token's row to the next one's */
    size_t row;    /* bytes of one row */
} kvb_plane;

/* The plane `kv` (KVB_K, KVB_V) of the layer with index `layer`. Asks nobody. */
KVB_API int kvb_profile_plane(const kvb_profile *profile, uint32_t layer, uint32_t kv, kvb_plane *out);

typedef struct kvb_room {
    size_t size;
    uint64_t capacity; /* blocks that this tenant could ever hold */
    uint64_t free;     /* blocks that it could be granted now */
    uint64_t held;     /* blocks that it holds now, credit included */
    uint64_t credit;   /* of these, ahead of need in this process */
} kvb_room;

/* Asks the broker how much there is. With several groups: capacity and free of the group that has least, as if the others
 * took nothing, held and credit of all together. */
KVB_API int kvb_profile_room(kvb_profile *profile, kvb_room *out);

/* Takes `blocks` blocks (of each group) as credit now, all or none: growing by as much, in whichever session of the profile, cannot be
 * refused then. Errors: NEVER_FITS, BUSY, OVER_LIMIT (needed, available in blocks), LOST, TIMEOUT, MAP. */
KVB_API KVB_MUST_CHECK int kvb_profile_reserve(kvb_profile *profile, uint32_t blocks);

/* Gives all credit of the profile back. */
KVB_API int kvb_profile_release_credit(kvb_profile *profile);

/* ------------------------------------------------------------------------------------------------ sessions --- */

/* kvb_open_options.flags: blocks that this process has used before keep their old bytes when they are used again.
 * Without it they read as zero, which whoever reads whole tiles beyond the written tokens needs. */
#define KVB_KEEP_STALE_BYTES 1u

typedef struct kvb_open_options {
    size_t size;
    const char *label;   /* the session's name for the operator; may be NULL */
    const char *model;   /* whatever tells this model's weights from others', such as a hash of the file: sessions share
                            prefixes only under the same text. NULL is the empty text */
    uint64_t max_tokens; /* the longest length if it is known, else 0: one that can never fit is refused at once */
    uint32_t flags;      /* KVB_KEEP_STALE_BYTES */
    uint32_t priority;   /* 1 to 255: who makes room for whom, at most the tenant's own; 0 for the tenant's own */
} kvb_open_options;

/* Opens a session without tokens. Errors: INVALID, NEVER_FITS (in tokens), OVER_LIMIT, LOST, TIMEOUT. */
KVB_API KVB_MUST_CHECK int kvb_session_open(kvb_profile *profile, const kvb_open_options *options, kvb_session **out);

/* Ends a session: its blocks go back, its views and its table are gone. IN_USE when another call runs on it. */
KVB_API int kvb_session_close(kvb_session *session);

/* Makes room for `tokens` tokens in all: the rows from the old length on may then be written. Fewer than there are
 * changes nothing. A shared block that the old length ends in becomes a copy of the session's own. Makes no system call
 * while credit lasts and the session has no views.
 * Errors: NEVER_FITS, BUSY, OVER_LIMIT (in blocks); INVALID (longer than a view of it); SESSION_LOST, LOST, TIMEOUT, MAP. */
KVB_API KVB_MUST_CHECK int kvb_session_ensure(kvb_session *session, uint64_t tokens);

/* Takes as credit, now, what growing to `tokens` tokens takes in steps of up to `step` tokens (what one ensure adds), all or
 * nothing: as long as no other session of the process uses the credit, ensure is not refused on the way. So a long prompt
 * is refused before it is computed, and layers with a window hold no more than the window and one step. Errors as
 * kvb_session_ensure. */
KVB_API KVB_MUST_CHECK int kvb_session_reserve(kvb_session *session, uint64_t tokens, uint64_t step);

enum {
    KVB_ADMITTED = 1,         /* growing to that length will not be refused, whatever others do */
    KVB_AFTER_EVICTION = 2,   /* it fits when `blocks` cached blocks of this tenant go: ask again with KVB_MAY_EVICT */
    KVB_WHEN_YOURS_FREE = 3,  /* it fits when `blocks` blocks that other sessions of this tenant hold are free */
    KVB_BUSY_WITH_OTHERS = 4, /* `blocks` are missing, and other tenants have them */
    KVB_TOO_LONG = 5          /* it never fits: too long by `blocks` */
};

/* kvb_session_admit, flags: cached prefixes of this tenant may go for it. */
#define KVB_MAY_EVICT 1u

typedef struct kvb_admission {
    size_t size;
    uint32_t verdict;  /* KVB_ADMITTED or what follows it */
    uint32_t reserved;
    uint64_t blocks;   /* in the sense of the verdict; with several groups, of the first one that lacks some */
} kvb_admission;

/* May the session grow to `tokens` tokens, the prompt and the longest answer, in steps of up to `step` tokens? Asked best
 * after attach: what was found is not needed again. Every group is promised what it will hold, or none is; a promise is
 * kept back for the session and not granted yet, so nothing lies idle. Not to be admitted is no error: it returns 0 and
 * says in `out` what would help, and what was promised before still is. A length that the session has, such as 0, gives
 * the promise back; trimming gives it room again; a fork has none. Sealed blocks do not come back when they leave a
 * window: with windows, ask again after sealing. Errors: NEVER_FITS (longer than any sequence can be), SESSION_LOST, INVALID,
 * LOST, TIMEOUT. */
KVB_API KVB_MUST_CHECK int kvb_session_admit(kvb_session *session, uint64_t tokens, uint64_t step, uint32_t flags,
                                             kvb_admission *out);

/* Makes the rows of tokens first to end - 1 writable, which are there already: what is shared or sealed among them
 * becomes a copy of the session's own. Errors as kvb_session_ensure. */
KVB_API KVB_MUST_CHECK int kvb_session_writable(kvb_session *session, uint64_t first, uint64_t end);

/* Tokens that the session holds, those dropped at its head counted in. */
KVB_API int64_t kvb_session_tokens(const kvb_session *session);

/* Index of the first token that no layer has dropped. */
KVB_API int64_t kvb_session_first_token(const kvb_session *session);

/* A session of higher priority needs this one's blocks: milliseconds until the broker ends it, at least 1; 0 when it is not
 * asked for. Close or trim it before, if the work can be done later; afterwards calls on it, and this one, are refused with
 * SESSION_LOST. Addresses of its rows, views and windows are good until it is closed, and what is written there disturbs nobody;
 * what is read there is what was there, zeros, or, where it was sealed, what another session of this user has there by now.
 * Asks nobody: it is told by any call that asks the broker, and by kvb_client_poll. While a call of one thread waits for the
 * broker, the broker reads nothing else of this client: sessions that may have to make room for others of this very process
 * are better closed first, or are another client's. Errors: SESSION_LOST. */
KVB_API int64_t kvb_session_wanted_back(const kvb_session *session);

/* Index of the first token whose rows are not what was sealed, if the broker has found such (`kvbctl fsck`): trim to it and
 * compute anew. As many as kvb_session_tokens when all is well. Told as kvb_session_wanted_back. */
KVB_API int64_t kvb_session_damaged_from(const kvb_session *session);

/* Drops the tokens from `tokens` on (a rejected draft, a new turn). Whole blocks go back. INVALID when layers with a window
 * have dropped what is read after them (kvb_session_set_rewind); 0 always works. */
KVB_API int kvb_session_trim(kvb_session *session, uint64_t tokens);

/* From now on layers with a window keep what is read after up to `tokens` of the newest tokens are trimmed: the length of a
 * draft. At first 0. */
KVB_API int kvb_session_set_rewind(kvb_session *session, uint64_t tokens);

/* Drops the tokens before `first` as far as they fill whole blocks (sliding window). Returns the first token that is
 * still there. Token numbers do not shift. */
KVB_API int64_t kvb_session_trim_head(kvb_session *session, uint64_t first);

/* A second session over the same tokens (beams, parallel samples). Nothing is copied: whoever grows first gets a copy of
 * the block that it writes in. Rows that are there may not be written by either until kvb_session_writable.
 * KVB_ERR_BUSY while a device that is not coherent imports unsealed blocks of the session by a window of the kind run. */
KVB_API KVB_MUST_CHECK int kvb_session_fork(kvb_session *session, kvb_session **out);

/* Publishes the whole blocks among the first `count` tokens, whose ids these are, from the sequence's start: they are
 * never written again, and sessions of the tenant with the same profile and model find them. Seal after all layers have
 * been written. Returns how many tokens can be found now: the whole blocks, or 0 if layers with a window have dropped what is
 * read after them, so seal a prompt where it ends, before the session grows on. */
KVB_API int64_t kvb_session_seal(kvb_session *session, const uint32_t *ids, size_t count);

/* Shares the longest published prefix of a prompt, in a session without tokens. Returns how many tokens it holds then: at
 * most count - 1, because the last token has to be computed for its logits. 0 when nothing was found. */
KVB_API int64_t kvb_session_attach(kvb_session *session, const uint32_t *ids, size_t count);

/* Keeps the blocks of the first `tokens` tokens for ever, which must be sealed (whole blocks; a rest is left out): the
 * resident system prompt. Returns how many blocks were not pinned before. BAD_REQUEST when they are not sealed; OVER_LIMIT
 * by `limits.pinned`, `limits.table-blocks`, or 64 prefixes pinned by this tenant. */
KVB_API int64_t kvb_session_pin(kvb_session *session, uint64_t tokens);

/* Lets them go again: a pin of exactly as many whole blocks, not a part of a longer one. Returns how many blocks nobody pins any
 * more. */
KVB_API int64_t kvb_session_unpin(kvb_session *session, uint64_t tokens);

/* Copies one row in: `bytes` is the plane's row. INVALID for a token that is shared or sealed (kvb_session_writable). */
KVB_API int kvb_session_write_row(kvb_session *session, uint64_t token, uint32_t layer, uint32_t kv, const void *row,
                                  size_t bytes);

/* Copies one row out. */
KVB_API int kvb_session_read_row(const kvb_session *session, uint64_t token, uint32_t layer, uint32_t kv, void *row,
                                 size_t bytes);

typedef struct kvb_stats {
    size_t size;
    uint64_t id;             /* as `kvbctl sessions` shows it */
    uint64_t tokens;         /* as kvb_session_tokens */
    uint64_t first_token;    /* as kvb_session_first_token */
    uint64_t blocks_private; /* blocks that only this session holds */
    uint64_t blocks_shared;  /* blocks that are sealed, or in another session too */
    uint64_t blocks_credit;  /* ahead of need, for all sessions of the profile in this process */
    uint64_t block_bytes;    /* bytes of one block; with several groups, of one of each */
    uint64_t bytes_held;     /* bytes of all blocks that the session holds, private and shared */
} kvb_stats;

/* Counts. Asks nobody. */
KVB_API int kvb_session_stats(const kvb_session *session, kvb_stats *out);

/* ---------------------------------------------------------------------------------------- direct addressing --- */

/* The block table, for kernels that find rows themselves. The pool is mapped once, at an address that never changes;
 * block i of the session starts at base + (table[i] << 12).
 *
 * VALID until the next call that changes the session: ensure, writable, trim, trim_head, fork, seal, attach, close. Fetch
 * it anew after each (it costs less than a row). Entries before first_token mean nothing.
 * Which rows may be WRITTEN: those that ensure or writable has made room for, until they are sealed or forked. The pool
 * is mapped writable as a whole: a write elsewhere goes through and spoils a neighbour. */
typedef struct kvb_map {
    size_t size;
    uint8_t *base;         /* for the client's life */
    const uint32_t *table; /* offsets from base in units of 4096 bytes, whatever the machine's page size */
    size_t blocks;         /* entries in it */
    size_t first_token;    /* tokens before it have been dropped */
    size_t tokens;         /* tokens that the session holds */
    uint32_t shift;        /* log2 of tokens per block */
    uint32_t reserved;
} kvb_map;

/* The table of a session of one group; INVALID with several. */
KVB_API int kvb_session_map(const kvb_session *session, kvb_map *out);

/* The table that the layer with index `layer` is in: one for each group. */
KVB_API int kvb_session_map_layer(const kvb_session *session, uint32_t layer, kvb_map *out);

/* Address of one token's row in a plane. Checks nothing: first_token <= token < tokens is the caller's. The rows of a
 * block follow each other at plane->stride, so a kernel needs this once per block. Another process may hold the same
 * sealed block: to read it is fine, and nobody writes it. */
static inline uint8_t *kvb_row(const kvb_map *map, const kvb_plane *plane, size_t token)
{
    const size_t in_block = token & (((size_t)1 << map->shift) - 1);
    return map->base + ((size_t)map->table[token >> map->shift] << 12) + plane->offset + in_block * plane->stride;
}

/* A plane in token order at one address: what an engine with contiguous K and V tensors needs. */
typedef struct kvb_view {
    size_t size;
    uint8_t *address; /* row of token 0; token t is at address + t * row */
    size_t bytes;     /* length of the range */
    size_t row;       /* bytes from one row to the next */
    size_t capacity;  /* tokens that fit: `capacity` rounded up to whole blocks */
} kvb_view;

/* Reserves `capacity` tokens of address space, at `address` if it is not NULL (whole pages, where nothing is mapped), and
 * shows plane `kv` of `layer` there. The address stays the same for the session's life; blocks appear as the session
 * grows, what is trimmed disappears. Tokens without a block read as zero and may not be written; those of shared or sealed
 * blocks may not be written either: SIGSEGV in both cases. Costs one mapping per block of the capacity. A session with
 * views does not grow beyond the smallest.
 * Errors: INVALID (planes of the profile are not whole pages; the text says which tokens per block would do),
 * TOO_MANY_MAPPINGS, MAP. */
KVB_API KVB_MUST_CHECK int kvb_session_view(kvb_session *session, uint32_t layer, uint32_t kv, uint64_t capacity,
                                            void *address, kvb_view *out);

/* ------------------------------------------------------------------------------------- windows for devices --- */

/* One contiguous range for a device, an NPU, over the scattered blocks of a session. docs/npu.md says which way works with
 * which driver. Close it when the device is done with it, and before its session: a session's end is the window's end too,
 * of which only the handle is left to close then. */
typedef struct kvb_window kvb_window;

/* The ways to make one. */
enum {
    KVB_WINDOW_AUTO = 0,    /* the first that the device of the broker's configuration can use */
    KVB_WINDOW_RUN = 1,     /* the blocks lie side by side in a dma-buf: (fd, offset) */
    KVB_WINDOW_UDMABUF = 2, /* a dma-buf over scattered memfd blocks: (fd, 0) */
    KVB_WINDOW_IOMMU = 3,   /* consecutive device addresses: address */
    KVB_WINDOW_BOUNCE = 4   /* a contiguous staging buffer, filled and drained in batches: (fd, offset of the batch) */
};

enum { KVB_WHOLE_BLOCKS = 0, KVB_ONE_PLANE = 1 };

/* kvb_window_options.flags: the device may not write. What a window over a shared prefix needs; iommu only. */
#define KVB_WINDOW_READ_ONLY 1u

typedef struct kvb_window_options {
    size_t size;
    uint64_t first;    /* tokens first to end; the window shows the whole blocks that they lie in */
    uint64_t end;
    uint64_t capacity; /* tokens that it may come to hold, if known: iommu reserves addresses for them. 0: four times */
    uint32_t how;      /* KVB_WINDOW_ */
    uint32_t what;     /* KVB_WHOLE_BLOCKS in table order, or KVB_ONE_PLANE in token order */
    uint32_t layer;    /* of the plane: index in the profile. For whole blocks: those of this layer's group */
    uint32_t kv;       /* of the plane: KVB_K, KVB_V */
    uint32_t flags;
    uint32_t reserved;
} kvb_window_options;

/* Errors: INVALID (no such tokens or layer; a plane that is not whole pages: the text says which tokens per block would do),
 * BAD_REQUEST (no way is possible: the text has all reasons), BUSY (no device addresses or no staging buffer just now),
 * OVER_LIMIT (windows of the session), BROKER_FAULT. */
KVB_API KVB_MUST_CHECK int kvb_session_window(kvb_session *session, const kvb_window_options *options, kvb_window **out);

typedef struct kvb_window_info {
    size_t size;
    uint64_t bytes;       /* of the window */
    uint64_t offset;      /* run: where it starts in the dma-buf */
    uint64_t address;     /* iommu: the first device address */
    uint64_t first;       /* tokens that it shows: whole blocks, so it may be more than the session holds */
    uint64_t end;
    uint64_t batch_bytes; /* bounce: the most bytes of one batch */
    uint64_t requests;    /* times that the broker was asked for it, growth included */
    uint32_t how;         /* which way it was */
    int32_t fd;           /* the dma-buf for the driver to import, -1 for iommu. It stays the window's; dup it to keep it */
} kvb_window_info;

/* Where it is. After kvb_window_extend, ask again. */
KVB_API int kvb_window_get_info(const kvb_window *window, kvb_window_info *out);

/* The ways that come before the one that was taken, one a line with the reason. As kvb_last_error. */
KVB_API int64_t kvb_window_declined(const kvb_window *window, char *text, size_t size);

/* Has it show all tokens up to `end`. While it does, nobody is asked; else it grows to twice its length if there is room. A
 * udmabuf is another one then: import it anew. iommu grows in place while its addresses last. */
KVB_API int kvb_window_extend(kvb_window *window, kvb_session *session, uint64_t end);

/* 1 while the session has the blocks that the window shows; 0 when one was trimmed or copied: stop the device, then extend
 * it or close it. */
KVB_API int kvb_window_is_current(const kvb_window *window, const kvb_session *session);

/* iommu: the device, bound to this tenant's address space, as VFIO gives it; it is the caller's to drive and to close. It
 * comes once, with the first iommu window of a process. UNSUPPORTED if it has not. */
KVB_API int kvb_window_take_device(kvb_window *window);

/* bounce: one half of the staging buffer. */
typedef struct kvb_batch {
    size_t size;
    uint64_t at;     /* where it starts in the window */
    uint64_t offset; /* where it starts in the staging buffer: what the device is told */
    uint64_t bytes;
    uint32_t half;
    uint32_t reserved;
} kvb_batch;

/* Copies the window's bytes from `at` on into a half of the staging buffer and hands it to the device. Waits for its turn
 * while other windows of the process have both. IN_USE: this window has a half and the other is not free: release it. */
KVB_API KVB_MUST_CHECK int kvb_window_load(kvb_window *window, const kvb_session *session, uint64_t at, kvb_batch *out);

/* A half for the device to write in; nothing is copied. Waits as kvb_window_load does. */
KVB_API KVB_MUST_CHECK int kvb_window_batch(kvb_window *window, const kvb_session *session, uint64_t at, kvb_batch *out);

/* Copies what the device has written into the session's blocks. */
KVB_API int kvb_window_drain(kvb_window *window, kvb_session *session, const kvb_batch *batch);

/* The device is done with this half. */
KVB_API int kvb_window_release(kvb_window *window, const kvb_batch *batch);

/* The device is done with the window: its blocks may be used again. Closes its descriptor. */
KVB_API int kvb_window_close(kvb_window *window);

/* ----------------------------------------------------------------------------------------------- attention --- */

/* What a value of a K or V row is stored as. */
enum { KVB_F16 = 0, KVB_F32 = 1 };

/* Working memory of kvb_attention: one per thread, about 90 KiB once used. */
typedef struct kvb_scratch kvb_scratch;

KVB_API KVB_MUST_CHECK int kvb_scratch_new(kvb_scratch **out);
KVB_API int kvb_scratch_free(kvb_scratch *scratch);

typedef struct kvb_attention_call {
    size_t size;
    const float *q;         /* [queries][query_heads][head_dim] */
    float *out;             /* [queries][query_heads][head_dim]; with kv_head_count, only the query heads of those KV heads.
                               Must not overlap q */
    uint64_t queries;       /* query i is at position kv_tokens - queries + i and sees the tokens up to and with that */
    uint64_t kv_tokens;     /* 0: all tokens of the session */
    uint64_t window;        /* the most tokens that a query sees, itself included; 0: the layer's window, all without one */
    uint32_t layer;         /* index in the profile */
    uint32_t element;       /* KVB_F16 ff.: what K and V rows hold, [kv_heads][head_dim] */
    uint32_t query_heads;   /* a multiple of kv_heads; query head h reads KV head h / (query_heads / kv_heads) */
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t first_kv_head; /* this call does KV heads first_kv_head to first_kv_head + kv_head_count - 1 */
    uint32_t kv_head_count; /* 0 with first_kv_head 0: all */
    float scale;            /* of the scores, before the softmax; 0: 1 / sqrt(head_dim) */
} kvb_attention_call;

/* Causal attention of `queries` queries over one layer of the session, on the calling thread. Products and sums are f32.
 * Threads share the work by calling with different queries (and kv_tokens to match) or different KV heads, each with its
 * own scratch: the result is the same bit for bit however it is cut. */
KVB_API int kvb_attention(const kvb_session *session, const kvb_attention_call *call, kvb_scratch *scratch);

#ifdef __cplusplus
}
#endif

#endif
