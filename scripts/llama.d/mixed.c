// The mixed load of a server in steady churn: eight sequences whose lengths are log-uniform from 16 to 2048 tokens, half
// of each a prompt; when one ends, the next begins in its place. After every batch it asks the plugin what the KV cache
// holds, and sums that up over time beside the bytes of the tokens that live. With "trim" it tells the plugin when a
// sequence has ended; llama.cpp itself tells nobody.
//
// usage: mixed MODEL SEQUENCES THREADS trim|silent SEED
// prints one object of JSON: live and held bytes in the mean over batches, bytes at the sequences' high-water marks
#include <ggml-backend.h>
#include <llama.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvbroker-ggml.h"

enum { SLOTS = 8, SHORTEST = 16, LONGEST = 2048, BATCH = 256 };

static uint64_t state;

static double uniform(void) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (double) (state >> 11) / (double) (1ull << 53);
}

static void quiet(enum ggml_log_level level, const char * text, void * data) {
    (void) data;
    if (level >= GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

int main(int count, char ** arg) {
    if (count != 6) {
        return 2;
    }
    const int sequences = atoi(arg[2]);
    const bool trims = !strcmp(arg[4], "trim");
    state = strtoull(arg[5], NULL, 10);
    llama_log_set(quiet, NULL);
    ggml_backend_load_all();
    struct llama_model * model = llama_model_load_from_file(arg[1], llama_model_default_params());
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = SLOTS * LONGEST;
    params.n_seq_max = SLOTS;
    params.n_batch = params.n_ubatch = BATCH;
    params.n_threads = params.n_threads_batch = atoi(arg[3]);
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    struct llama_context * context = model ? llama_init_from_model(model, params) : NULL;
    ggml_backend_reg_t reg = ggml_backend_reg_by_name("KVBROKER");
    if (!context || !reg) {
        fprintf(stderr, "no context, or no plugin\n");
        return 3;
    }
    kvbroker_ggml_stats_t stats = (kvbroker_ggml_stats_t) ggml_backend_reg_get_proc_address(reg, "kvbroker_ggml_stats");
    kvbroker_ggml_trim_t trim = (kvbroker_ggml_trim_t) ggml_backend_reg_get_proc_address(reg, "kvbroker_ggml_trim");
    struct kvbroker_ggml_stats s;
    if (!stats || !trim || stats(&s, 1) != 1) {
        fprintf(stderr, "no KV buffer of the plugin\n");
        return 3;
    }
    const double token_bytes = (double) s.bytes / (double) (s.cells * s.streams);

    int length[SLOTS] = {0}, have[SLOTS] = {0}, most[SLOTS] = {0};
    int begun = 0, ended = 0;
    double live = 0, held = 0, waste = 0;
    long batches = 0, tokens = 0;
    struct llama_batch batch = llama_batch_init(BATCH, 0, 1);
    // Until the last has begun: what follows would be a load that fades.
    while (begun < sequences) {
        batch.n_tokens = 0;
        for (int slot = 0; slot < SLOTS; slot++) {
            if (have[slot] == length[slot]) {
                if (length[slot]) {
                    llama_memory_seq_rm(llama_get_memory(context), slot, -1, -1);
                    ended++;
                    if (trims && trim(s.id, (uint32_t) slot, 0, s.cells) < 0) {
                        return 4;
                    }
                }
                length[slot] = (int) (SHORTEST * pow((double) LONGEST / SHORTEST, uniform()));
                have[slot] = 0;
                begun++;
            }
            // What is left of the prompt, as far as the batch has room; or one token.
            const int prompt = length[slot] / 2 - have[slot], room = BATCH - batch.n_tokens - (SLOTS - 1 - slot);
            int now = prompt > 1 ? prompt : 1;
            now = now < room ? now : room;
            for (int i = 0; i < now; i++) {
                const int at = batch.n_tokens++;
                batch.token[at] = 1000 + (llama_token) (uniform() * 5000);
                batch.pos[at] = have[slot]++;
                batch.n_seq_id[at] = 1;
                batch.seq_id[at][0] = slot;
                batch.logits[at] = 0;
            }
            most[slot] = most[slot] > have[slot] ? most[slot] : have[slot];
        }
        batch.logits[batch.n_tokens - 1] = 1;
        if (llama_decode(context, batch)) {
            return 5;
        }
        tokens += batch.n_tokens;
        int alive = 0;
        for (int slot = 0; slot < SLOTS; slot++) {
            alive += have[slot];
        }
        stats(&s, 1);
        batches++;
        live += alive * token_bytes;
        held += (double) s.units_held * (double) s.block_bytes;
        waste += (double) s.units_held * (double) s.block_bytes / (alive * token_bytes);
    }
    double high = 0;
    for (int slot = 0; slot < SLOTS; slot++) {
        high += most[slot] * token_bytes;
    }
    printf("{\"sequences\": %d, \"tokens\": %ld, \"batches\": %ld, \"live\": %.0f, \"held\": %.0f, \"over_live\": %.4f, "
           "\"held_at_end\": %.0f, \"high_water\": %.0f}\n",
           ended, tokens, batches, live / batches, held / batches, waste / batches,
           (double) s.units_held * (double) s.block_bytes, high);
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
    return 0;
}
