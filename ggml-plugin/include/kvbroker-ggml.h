/* What libggml-kvbroker.so offers beyond ggml's own interface, for a program that wants it. Nothing has to be linked:
 *
 *     ggml_backend_reg_t reg = ggml_backend_reg_by_name("KVBROKER");
 *     kvbroker_ggml_trim_t trim = (kvbroker_ggml_trim_t) ggml_backend_reg_get_proc_address(reg, "kvbroker_ggml_trim");
 *
 * A KV buffer is what llama.cpp allocates for a context, or for one kind of its layers. It has the same cells in every
 * stream; a context whose cache is not unified has one stream per sequence, and fills its cells in order. */
#ifndef KVBROKER_GGML_H
#define KVBROKER_GGML_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kvbroker_ggml_stats {
    uint64_t id;            /* of the buffer, for the other calls */
    uint64_t bytes;         /* of address space */
    uint64_t block_bytes;   /* of one unit's block in the pool */
    uint64_t units;
    uint64_t units_held;    /* in the pool */
    uint64_t units_spilled; /* in private memory, because the pool was empty: see KVBROKER_SPILL */
    uint64_t faults;        /* writes that waited for a unit */
    uint64_t cells;         /* tokens of one stream */
    uint64_t streams;
};

/* Fills `out` with the KV buffers that there are, at most `most`; returns how many there are. */
typedef int (*kvbroker_ggml_stats_t)(struct kvbroker_ggml_stats * out, int most);

/* Memory for cells `from` to `to` of a stream now, so that writing them cannot fail. 0; or -1 when it cannot be had, or
 * when there is no such buffer, stream or cell. */
typedef int (*kvbroker_ggml_ensure_t)(uint64_t id, uint32_t stream, uint64_t from, uint64_t to);

/* Cells `from` to `to` of a stream hold nothing that is needed: after llama_memory_seq_rm, of which llama.cpp tells
 * nobody. Units that lie in them wholly go back to the pool and read as zero. Returns how many, or -1. The caller sees to
 * it that nothing is decoded meanwhile. */
typedef int (*kvbroker_ggml_trim_t)(uint64_t id, uint32_t stream, uint64_t from, uint64_t to);

#ifdef __cplusplus
}
#endif

#endif
