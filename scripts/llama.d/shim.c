// Loaded with LD_PRELOAD into an unmodified llama.cpp program, to make what cannot be waited for:
//
//   SHIM_VERSION=9.9.9     its ggml says that it is of this version
//   SHIM_MAPPINGS=60000    so many mappings are there already
//   SHIM_LOCK=1            all its memory, now and later, is locked (mlockall)
//   SHIM_KILL=clear:2      SIGKILL a moment after the second such call has begun: load (of the
//                          backends), create (of buffers), clear, compute
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void * next(const char * name) {
    void * found = dlsym(RTLD_NEXT, name);
    if (!found) {
        fprintf(stderr, "shim: there is no %s\n", name);
        abort();
    }
    return found;
}

const char * ggml_version(void) {
    const char * other = getenv("SHIM_VERSION");
    return other ? other : ((const char * (*) (void)) next("ggml_version"))();
}

__attribute__((constructor)) static void map_much(void) {
    const char * count = getenv("SHIM_MAPPINGS");
    const long page = sysconf(_SC_PAGESIZE);
    if (!count) {
        return;
    }
    // Neighbours of different protection, so that the kernel cannot make one of them.
    for (int i = 0; i < atoi(count); i++) {
        mmap(NULL, page, i % 2 ? PROT_NONE : PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
}

__attribute__((constructor)) static void lock_all(void) {
    if (getenv("SHIM_LOCK") && mlockall(MCL_CURRENT | MCL_FUTURE)) {
        perror("shim: mlockall");
        abort();
    }
}

static void * kill_soon(void * nothing) {
    usleep(2000);
    kill(getpid(), SIGKILL);
    return nothing;
}

static void called(const char * what) {
    static atomic_int calls;
    const char * wanted = getenv("SHIM_KILL");
    const size_t length = strlen(what);
    if (wanted && !strncmp(wanted, what, length) && wanted[length] == ':' && atomic_fetch_add(&calls, 1) + 1 == atoi(wanted + length + 1)) {
        // Said here, so that a test sees that this was the way it ended.
        fprintf(stderr, "shim: killed in %s\n", what);
        pthread_t thread;
        pthread_create(&thread, NULL, kill_soon, NULL);
    }
}

void ggml_backend_buffer_clear(void * buffer, uint8_t value) {
    called("clear");
    ((void (*)(void *, uint8_t)) next("ggml_backend_buffer_clear"))(buffer, value);
}

int ggml_backend_sched_graph_compute_async(void * sched, void * graph) {
    called("compute");
    return ((int (*)(void *, void *)) next("ggml_backend_sched_graph_compute_async"))(sched, graph);
}

void * ggml_backend_alloc_ctx_tensors_from_buft(void * context, void * type) {
    called("create");
    return ((void * (*) (void *, void *)) next("ggml_backend_alloc_ctx_tensors_from_buft"))(context, type);
}

void * ggml_backend_load_all(void) {
    called("load");
    return ((void * (*) (void)) next("ggml_backend_load_all"))();
}
