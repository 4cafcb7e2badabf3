// Prints a hash of every logit of fixed work: a prompt, then greedy tokens, then batches of several sequences, a sequence
// copied, shifted and dropped, and a state saved and restored. Two runs that print the same have computed the same, bit
// for bit. Only llama.cpp's public C API is used; with the plugin loaded, its extension calls are tried as well.
//
// usage: logits MODEL TYPE FLASH TOKENS THREADS      TYPE: f16 bf16 f32 q8_0 q4_0 mixed; FLASH: 0 1
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>
#include <llama.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvbroker-ggml.h"

static uint64_t hash = 14695981039346656037ull;

static void add(const void *data, size_t bytes) {
    const unsigned char *at = data;
    while (bytes--) {
        hash = (hash ^ *at++) * 1099511628211ull;
    }
}

static void said(const char *what) {
    printf("%s %016llx\n", what, (unsigned long long) hash);
    hash = 14695981039346656037ull;
}

static void quiet(enum ggml_log_level level, const char *text, void *data) {
    (void) data;
    if (level >= GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static enum ggml_type type_of(const char *name, bool is_v) {
    if (!strcmp(name, "mixed")) {
        return is_v ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
    }
    static const enum ggml_type known[] = {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (!strcmp(name, ggml_type_name(known[i]))) {
            return known[i];
        }
    }
    fprintf(stderr, "no type %s\n", name);
    exit(2);
}

static llama_token best(const float *logits, int count) {
    int at = 0;
    for (int i = 1; i < count; i++) {
        if (logits[i] > logits[at]) {
            at = i;
        }
    }
    return at;
}

static void check(int result, const char *what) {
    if (result) {
        fprintf(stderr, "%s: %d\n", what, result);
        exit(3);
    }
}

// One token for each of several sequences, each with logits.
static void step(struct llama_context *c, struct llama_batch *b, int sequences, int *position, llama_token *next, int vocab) {
    b->n_tokens = sequences;
    for (int s = 0; s < sequences; s++) {
        b->token[s] = next[s];
        b->pos[s] = position[s]++;
        b->n_seq_id[s] = 1;
        b->seq_id[s][0] = s;
        b->logits[s] = 1;
    }
    check(llama_decode(c, *b), "decode of several sequences");
    for (int s = 0; s < sequences; s++) {
        const float *l = llama_get_logits_ith(c, s);
        add(l, vocab * sizeof *l);
        next[s] = best(l, vocab);
    }
}

static bool all(const uint8_t *bytes, size_t count, uint8_t value) {
    while (count--) {
        if (*bytes++ != value) {
            return false;
        }
    }
    return true;
}

// Every function of the plugin's buffers, through ggml's public interface; returns the line that is wrong, or 0. With
// names of a KV cache, of a recurrent state, and with a size alone.
static int buffers_work(ggml_backend_dev_t device) {
    static uint8_t out[3 * 64 * 2], in[sizeof out];
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    static const char *names[][2] = {{"cache_k_l0", "cache_v_l0"}, {"cache_r_l0", "cache_s_l0"}};
    for (size_t i = 0; i < sizeof in; i++) {
        in[i] = (uint8_t) (i * 7 + 1);
    }
    for (int kind = 0; kind < 2; kind++) {
        struct ggml_init_params params = {16 * ggml_tensor_overhead(), NULL, true};
        struct ggml_context *ctx = ggml_init(params);
        struct ggml_tensor *k = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, 64, 4096, 2);
        struct ggml_tensor *v = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, 64, 4096, 2);
        struct ggml_tensor *view = ggml_view_2d(ctx, k, 64, 4096, k->nb[1], k->nb[2]);
        ggml_set_name(k, names[kind][0]);
        ggml_set_name(v, names[kind][1]);
        ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, type);
        if (!buffer || !ggml_backend_buffer_is_host(buffer) || view->data != (char *) k->data + k->nb[2]) {
            return __LINE__;
        }
        ggml_backend_buffer_clear(buffer, 0);
        ggml_backend_tensor_get(v, out, 4096 * 64, sizeof out);
        if (!all(out, sizeof out, 0)) {
            return __LINE__;
        }
        ggml_backend_tensor_set(k, in, 128 * 1000 + 2, sizeof in);
        ggml_backend_tensor_get(k, out, 128 * 1000 + 2, sizeof out);
        if (memcmp(in, out, sizeof in)) {
            return __LINE__;
        }
        ggml_backend_tensor_set(view, in, 128, sizeof in);
        ggml_backend_tensor_get(k, out, k->nb[2] + 128, sizeof out);
        if (memcmp(in, out, sizeof in)) {
            return __LINE__;
        }
        ggml_backend_tensor_memset(v, 9, 12288 - 50, 100);
        ggml_backend_tensor_get(v, out, 12288 - 50, 100);
        if (!all(out, 100, 9)) {
            return __LINE__;
        }
        ggml_backend_tensor_copy(k, v);
        ggml_backend_tensor_get(v, out, 128 * 1000 + 2, sizeof out);
        if (memcmp(in, out, sizeof in)) {
            return __LINE__;
        }
        ggml_backend_buffer_clear(buffer, 5);
        ggml_backend_tensor_get(k, out, ggml_nbytes(k) - sizeof out, sizeof out);
        if (!all(out, sizeof out, 5)) {
            return __LINE__;
        }
        ggml_backend_buffer_clear(buffer, 0);
        ggml_backend_tensor_get(k, out, ggml_nbytes(k) - sizeof out, sizeof out);
        if (!all(out, sizeof out, 0)) {
            return __LINE__;
        }
        ggml_backend_buffer_reset(buffer);
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
    ggml_backend_buffer_t plain = ggml_backend_buft_alloc_buffer(type, 1 << 20);
    if (!plain || ggml_backend_buffer_get_size(plain) < 1 << 20) {
        return __LINE__;
    }
    uint8_t *base = ggml_backend_buffer_get_base(plain);
    base[12345] = 1;
    if (base[12345] != 1 || base[12346] != 0) {
        return __LINE__;
    }
    ggml_backend_buffer_free(plain);
    // A thousand buffers, one after the other.
    for (int i = 0; i < 1000; i++) {
        plain = ggml_backend_buft_alloc_buffer(type, 1 << 20);
        if (!plain) {
            return __LINE__;
        }
        ((uint8_t *) ggml_backend_buffer_get_base(plain))[i * 100] = 1;
        ggml_backend_buffer_free(plain);
    }
    return 0;
}

int main(int count, char **arg) {
    if (count != 6) {
        return 2;
    }
    const int tokens = atoi(arg[4]), sequences = 3;
    llama_log_set(quiet, NULL);
    ggml_backend_load_all();
    // Once more, for the test that this does no harm.
    const char *again = getenv("LOGITS_LOAD");
    if (again && !ggml_backend_load(again)) {
        return 6;
    }
    struct llama_model_params mp = llama_model_default_params();
    struct llama_model *model = llama_model_load_from_file(arg[1], mp);
    if (!model) {
        return 3;
    }
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = 512 * sequences;
    cp.n_seq_max = sequences;
    cp.n_threads = cp.n_threads_batch = atoi(arg[5]);
    cp.flash_attn_type = arg[3][0] == '1' ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    cp.type_k = type_of(arg[2], false);
    cp.type_v = type_of(arg[2], true);
    struct llama_context *c = llama_init_from_model(model, cp);
    if (!c) {
        return 4;
    }
    const struct llama_vocab *vocab = llama_model_get_vocab(model);
    const int words = llama_vocab_n_tokens(vocab);
    static const char prompt[] = "The spindle of the machine is getting hot. Say in short, plain sentences what to check "
                                 "first, and when the machine has to be stopped. Begin with the coolant.";
    llama_token ids[256];
    const int n = llama_tokenize(vocab, prompt, sizeof prompt - 1, ids, 256, true, true);

    // One sequence, greedily.
    check(llama_decode(c, llama_batch_get_one(ids, n)), "decode");
    for (int i = 0; i < tokens; i++) {
        const float *l = llama_get_logits_ith(c, -1);
        add(l, words * sizeof *l);
        llama_token next = best(l, words);
        check(llama_decode(c, llama_batch_get_one(&next, 1)), "decode");
    }
    said("one");

    // State: saved with parts that were never written, dropped, restored; what follows is the same.
    llama_memory_t memory = llama_get_memory(c);
    const size_t size = llama_state_get_size(c);
    uint8_t *state = malloc(size);
    const size_t saved = llama_state_get_data(c, state, size);
    llama_memory_clear(memory, true);
    if (llama_state_set_data(c, state, saved) != saved) {
        return 5;
    }
    free(state);
    llama_token next = 28;
    check(llama_decode(c, llama_batch_get_one(&next, 1)), "decode after a restore");
    add(llama_get_logits_ith(c, -1), words * sizeof(float));
    said("restored");

    // Several sequences in one batch: from one prompt, each with a first word of its own.
    int position[] = {n, n - 1, n - 2};
    llama_memory_clear(memory, true);
    struct llama_batch b = llama_batch_init(256, 0, 1);
    for (int s = 0; s < sequences; s++) {
        b.n_tokens = 0;
        for (int i = 0; i < n - s; i++, b.n_tokens++) {
            b.token[i] = ids[i];
            b.pos[i] = i;
            b.n_seq_id[i] = 1;
            b.seq_id[i][0] = s;
            b.logits[i] = i == n - s - 1;
        }
        check(llama_decode(c, b), "decode of a prompt");
        add(llama_get_logits_ith(c, n - s - 1), words * sizeof(float));
    }
    llama_token following[] = {28, 198, 281};
    for (int i = 0; i < tokens / 4; i++) {
        step(c, &b, sequences, position, following, words);
    }
    said("several");

    // One is dropped and copied anew from another; then the head of all goes and the rest is shifted.
    llama_memory_seq_rm(memory, 2, -1, -1);
    llama_memory_seq_cp(memory, 0, 2, -1, -1);
    position[2] = position[0];
    for (int i = 0; i < 4; i++) {
        step(c, &b, sequences, position, following, words);
    }
    said("copied");
    // ggml's CPU backend cannot rotate bf16 (it aborts).
    if (llama_memory_can_shift(memory) && cp.type_k != GGML_TYPE_BF16) {
        for (int s = 0; s < sequences; s++) {
            llama_memory_seq_rm(memory, s, 4, 12);
            llama_memory_seq_add(memory, s, 12, -1, -8);
            position[s] -= 8;
        }
        for (int i = 0; i < 4; i++) {
            step(c, &b, sequences, position, following, words);
        }
        said("shifted");
    }

    // What the plugin offers beyond ggml's interface. Nothing of this reaches standard output, which is compared.
    for (size_t i = 0; i < ggml_backend_reg_count(); i++) {
        ggml_backend_reg_t reg = ggml_backend_reg_get(i);
        kvbroker_ggml_stats_t stats = (kvbroker_ggml_stats_t) ggml_backend_reg_get_proc_address(reg, "kvbroker_ggml_stats");
        kvbroker_ggml_ensure_t ensure = (kvbroker_ggml_ensure_t) ggml_backend_reg_get_proc_address(reg, "kvbroker_ggml_ensure");
        kvbroker_ggml_trim_t trim = (kvbroker_ggml_trim_t) ggml_backend_reg_get_proc_address(reg, "kvbroker_ggml_trim");
        struct kvbroker_ggml_stats s[4], after;
        if (!stats || !ensure || !trim || strcmp(ggml_backend_reg_name(reg), "KVBROKER")) {
            continue;
        }
        const int buffers = stats(s, 4);
        fprintf(stderr, "extension: buffers %d held %llu of %llu faults %llu streams %llu cells %llu\n", buffers,
                (unsigned long long) s[0].units_held, (unsigned long long) s[0].units, (unsigned long long) s[0].faults,
                (unsigned long long) s[0].streams, (unsigned long long) s[0].cells);
        // The second sequence ends: what its stream holds beyond the first cells goes back.
        llama_memory_seq_rm(memory, 1, -1, -1);
        const int back = trim(s[0].id, 1, 0, s[0].cells);
        const int more = ensure(s[0].id, 1, 0, s[0].cells);
        stats(&after, 1);
        fprintf(stderr, "extension: trimmed %d, ensured %d, held then %llu\n", back, more, (unsigned long long) after.units_held);
        fprintf(stderr, "extension: wrong %d %d %d\n", trim(s[0].id + 999, 0, 0, 1), trim(s[0].id, 99, 0, 1),
                ensure(s[0].id, 0, 5, s[0].cells + 1));
    }
    ggml_backend_dev_t device = ggml_backend_dev_by_name("KVBROKER0");
    if (device) {
        const int wrong = buffers_work(device);
        if (wrong) {
            fprintf(stderr, "buffers: wrong in line %d\n", wrong);
            return 7;
        }
        fprintf(stderr, "buffers: every function works\n");
    }
    llama_batch_free(b);
    llama_free(c);
    llama_model_free(model);
    return 0;
}
