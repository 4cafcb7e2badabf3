// What a program can say to the plugin beyond ggml's interface: how much its KV cache holds, that a sequence has ended,
// and that room will be needed. Works on any llama.cpp; without the plugin it only says that it is not there.
//
//   cc -o trim trim.c -I../include -lllama -lggml -lggml-base
//   GGML_BACKEND_PATH=/usr/lib/aarch64-linux-gnu/ggml/libggml-kvbroker.so ./trim model.gguf
#include <ggml-backend.h>
#include <inttypes.h>
#include <llama.h>
#include <stdio.h>
#include <string.h>

#include "kvbroker-ggml.h"

enum { SEQUENCES = 2, TOKENS_EACH = 300, CONTEXT_EACH = 1024 };

// Puts the same words into both sequences, with no use but to fill their caches.
static int fill(struct llama_context * context, llama_token word) {
    struct llama_batch batch = llama_batch_init(TOKENS_EACH, 0, 1);
    int failed = 0;
    for (int sequence = 0; sequence < SEQUENCES && !failed; sequence++) {
        for (batch.n_tokens = 0; batch.n_tokens < TOKENS_EACH; batch.n_tokens++) {
            const int i = batch.n_tokens;
            batch.token[i] = word + i;
            batch.pos[i] = i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = sequence;
            batch.logits[i] = i == TOKENS_EACH - 1;
        }
        failed = llama_decode(context, batch);
    }
    llama_batch_free(batch);
    return failed;
}

static struct kvbroker_ggml_stats show(kvbroker_ggml_stats_t stats, const char * when) {
    struct kvbroker_ggml_stats s;
    memset(&s, 0, sizeof s);
    stats(&s, 1);
    printf("%-28s %3" PRIu64 " of %3" PRIu64 " units of %" PRIu64 " KiB, %" PRIu64 " faults\n", when, s.units_held, s.units,
           s.block_bytes / 1024, s.faults);
    return s;
}

int main(int count, char ** arg) {
    if (count != 2) {
        fprintf(stderr, "usage: trim MODEL.gguf\n");
        return 2;
    }
    ggml_backend_load_all(); // reads GGML_BACKEND_PATH
    struct llama_model * model = llama_model_load_from_file(arg[1], llama_model_default_params());
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = SEQUENCES * CONTEXT_EACH;
    params.n_batch = TOKENS_EACH;
    params.n_seq_max = SEQUENCES;                            // a stream for each: the cache is not unified
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;  // V in rows, so that tokens are what takes memory
    struct llama_context * context = model ? llama_init_from_model(model, params) : NULL;
    if (!context || fill(context, 1000)) {
        fprintf(stderr, "the model cannot be run\n");
        return 1;
    }

    ggml_backend_reg_t reg = ggml_backend_reg_by_name("KVBROKER");
    if (!reg || !ggml_backend_reg_dev_count(reg)) {
        printf("the plugin is not there, or has no broker: the KV cache is in private memory\n");
        return 0;
    }
    kvbroker_ggml_stats_t stats = (kvbroker_ggml_stats_t) ggml_backend_reg_get_proc_address(reg, "kvbroker_ggml_stats");
    kvbroker_ggml_ensure_t ensure = (kvbroker_ggml_ensure_t) ggml_backend_reg_get_proc_address(reg, "kvbroker_ggml_ensure");
    kvbroker_ggml_trim_t trim = (kvbroker_ggml_trim_t) ggml_backend_reg_get_proc_address(reg, "kvbroker_ggml_trim");
    if (!stats || !ensure || !trim) {
        fprintf(stderr, "a plugin of another version\n");
        return 1;
    }
    const struct kvbroker_ggml_stats kv = show(stats, "two sequences of 300 tokens");

    // llama.cpp tells no backend which cells it drops, so the program does: first to llama.cpp, then to the plugin.
    llama_memory_seq_rm(llama_get_memory(context), 1, -1, -1);
    show(stats, "the second is dropped");
    const int freed = trim(kv.id, 1, 0, kv.cells);
    show(stats, "and its stream trimmed");

    // Room for the next one now, where a refusal is a value and not the end of the process.
    const int refused = ensure(kv.id, 1, 0, 512);
    show(stats, "512 tokens asked for");
    printf("freed %d units, %s\n", freed, refused ? "and the pool has no room" : "and there is room for 512 tokens");

    llama_free(context);
    llama_model_free(model);
    return 0;
}
