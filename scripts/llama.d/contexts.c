// Opens and closes thousands of contexts in one process, decodes in each, and compares what the process has of
// descriptors, threads and mappings, and who handles SIGSEGV, with how it was after the first few.
//
// usage: contexts MODEL COUNT
#include <dirent.h>
#include <ggml-backend.h>
#include <llama.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

struct had {
    int descriptors, threads, mappings;
    void (*handler)(int, siginfo_t *, void *);
};

static int entries(const char * directory) {
    DIR * open = opendir(directory);
    int count = 0;
    while (open && readdir(open)) {
        count++;
    }
    closedir(open);
    return count;
}

static struct had have(void) {
    struct had now = {entries("/proc/self/fd"), entries("/proc/self/task"), 0, NULL};
    FILE * maps = fopen("/proc/self/maps", "r");
    for (int c; maps && (c = fgetc(maps)) != EOF;) {
        now.mappings += c == '\n';
    }
    fclose(maps);
    struct sigaction action;
    sigaction(SIGSEGV, NULL, &action);
    now.handler = action.sa_sigaction;
    return now;
}

static void quiet(enum ggml_log_level level, const char * text, void * data) {
    (void) data;
    if (level >= GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

int main(int count, char ** arg) {
    if (count != 3) {
        return 2;
    }
    enum { WARM_UP = 20 };
    const int contexts = atoi(arg[2]);
    llama_log_set(quiet, NULL);
    ggml_backend_load_all();
    struct llama_model * model = llama_model_load_from_file(arg[1], llama_model_default_params());
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 512;
    params.n_batch = params.n_ubatch = 32;
    params.n_threads = params.n_threads_batch = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    struct had before = {0, 0, 0, NULL};
    for (int i = 0; model && i < contexts; i++) {
        if (i == WARM_UP) {
            before = have();
        }
        struct llama_context * context = llama_init_from_model(model, params);
        llama_token token = 5;
        if (!context || llama_decode(context, llama_batch_get_one(&token, 1))) {
            fprintf(stderr, "context %d cannot be used\n", i);
            return 3;
        }
        llama_free(context);
    }
    const struct had after = have();
    printf("descriptors %d %d threads %d %d mappings %d %d handler %s\n", before.descriptors, after.descriptors,
           before.threads, after.threads, before.mappings, after.mappings, before.handler == after.handler ? "same" : "other");
    llama_model_free(model);
    return 0;
}
