/* What an NPU runtime does with the broker: a session's KV as one dma-buf, imported by a DRM driver.
 *
 *   cc -std=gnu11 npu-import.c $(pkg-config --cflags --libs kvbroker) -o npu-import
 *   ./npu-import /dev/dri/card0                      the broker of this machine (KVBROKER_SOCKET, or its usual place)
 *   ./npu-import /dev/dri/card0 /path/to.sock        the broker at this socket
 *   ./npu-import /dev/dri/card0 /path/to.sock run    and the window made in this way: run, udmabuf
 *
 * Works with every driver that imports through PRIME: rknpu (/dev/dri/renderD*), etnaviv, panthor, vgem. RKNN takes the
 * same descriptor with rknn_create_mem_from_fd. Prints how many hold the dma-buf, and exits with 0 if the driver's view of it
 * has the session's bytes.
 */
#include <kvbroker.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

/* From <drm/drm.h>, which not every toolchain for a board has. */
struct drm_prime_handle {
    uint32_t handle;
    uint32_t flags;
    int32_t fd;
};
struct drm_gem_close {
    uint32_t handle;
    uint32_t pad;
};
#define DRM_IOCTL_GEM_CLOSE _IOW('d', 0x09, struct drm_gem_close)
#define DRM_IOCTL_PRIME_HANDLE_TO_FD _IOWR('d', 0x2d, struct drm_prime_handle)
#define DRM_IOCTL_PRIME_FD_TO_HANDLE _IOWR('d', 0x2e, struct drm_prime_handle)
#define DRM_CLOEXEC O_CLOEXEC
#define DRM_RDWR O_RDWR

enum { LAYERS = 2, ROW = 256, TOKENS_PER_BLOCK = 16, TOKENS = 5 * TOKENS_PER_BLOCK + 3 };

static void check_at(int64_t result, const char *what, int line)
{
    if (result >= 0)
        return;
    char text[1024];
    kvb_last_error(text, sizeof text);
    fprintf(stderr, "npu-import.c:%d: %s: %s: %s\n", line, what, kvb_error_name((int)result), text);
    exit(1);
}
#define CHECK(call) check_at((call), #call, __LINE__)

static void kernel(int result, const char *what)
{
    if (result >= 0)
        return;
    fprintf(stderr, "npu-import.c: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* Descriptors, mappings and imports of a dma-buf, as the kernel counts them. */
static long holders(int fd)
{
    char path[64], line[128];
    long count = -1;
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
    FILE *info = fopen(path, "r");
    while (info && fgets(line, sizeof line, info))
        sscanf(line, "count: %ld", &count);
    if (info)
        fclose(info);
    return count;
}

static uint8_t byte_of(unsigned token, unsigned i)
{
    return (uint8_t)(token * 31 + i * 7 + 1);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: %s DRM_NODE [SOCKET [run|udmabuf]]\n", argv[0]);
        return 2;
    }
    kvb_client *client;
    kvb_profile *profile;
    kvb_session *session;
    kvb_window *window;
    kvb_geometry geometry = KVB_INIT(kvb_geometry);
    geometry.name = "npu-import";
    geometry.element = "int8";
    geometry.layers = LAYERS;
    geometry.k_row = geometry.v_row = ROW;
    geometry.tokens_per_block = TOKENS_PER_BLOCK;
    CHECK(kvb_connect(argc > 2 ? argv[2] : NULL, NULL, &client));
    CHECK(kvb_profile_new(client, &geometry, &profile));
    CHECK(kvb_session_open(profile, NULL, &session));
    CHECK(kvb_session_ensure(session, TOKENS));
    for (unsigned token = 0; token < TOKENS; token++) {
        uint8_t row[ROW];
        for (unsigned i = 0; i < ROW; i++)
            row[i] = byte_of(token, i);
        CHECK(kvb_session_write_row(session, token, 1, KVB_V, row, sizeof row));
    }

    /* The V of layer 1 in token order, wherever its blocks lie. */
    kvb_window_options options = KVB_INIT(kvb_window_options);
    options.end = TOKENS;
    options.what = KVB_ONE_PLANE;
    options.layer = 1;
    options.kv = KVB_V;
    if (argc > 3)
        options.how = strcmp(argv[3], "run") == 0 ? KVB_WINDOW_RUN : KVB_WINDOW_UDMABUF;
    CHECK(kvb_session_window(session, &options, &window));
    kvb_window_info info = KVB_INIT(kvb_window_info);
    CHECK(kvb_window_get_info(window, &info));
    if (info.fd < 0 || info.how == KVB_WINDOW_BOUNCE) {
        fprintf(stderr, "npu-import.c: way %u is not one that a DRM driver imports as a whole\n", info.how);
        return 1;
    }
    long before = holders(info.fd);

    /* The driver takes it. */
    int device = open(argv[1], O_RDWR | O_CLOEXEC);
    kernel(device, argv[1]);
    struct drm_prime_handle prime = { .fd = info.fd };
    kernel(ioctl(device, DRM_IOCTL_PRIME_FD_TO_HANDLE, &prime), "DRM_IOCTL_PRIME_FD_TO_HANDLE");
    long imported = holders(info.fd);

    /* What the driver has, seen through the driver. */
    struct drm_prime_handle again = { .handle = prime.handle, .flags = DRM_CLOEXEC | DRM_RDWR };
    kernel(ioctl(device, DRM_IOCTL_PRIME_HANDLE_TO_FD, &again), "DRM_IOCTL_PRIME_HANDLE_TO_FD");
    uint8_t *seen = mmap(NULL, info.offset + info.bytes, PROT_READ, MAP_SHARED, again.fd, 0);
    kernel(seen == MAP_FAILED ? -1 : 0, "mmap");
    unsigned wrong = 0;
    for (unsigned token = 0; token < TOKENS; token++)
        for (unsigned i = 0; i < ROW; i++)
            wrong += seen[info.offset + (size_t)token * ROW + i] != byte_of(token, i);
    munmap(seen, info.offset + info.bytes);
    close(again.fd);

    struct drm_gem_close release = { .handle = prime.handle };
    kernel(ioctl(device, DRM_IOCTL_GEM_CLOSE, &release), "DRM_IOCTL_GEM_CLOSE");
    long after = holders(info.fd);
    close(device);

    printf("window: %llu bytes of %d tokens, way %u\n", (unsigned long long)info.bytes, TOKENS, info.how);
    printf("holders: %ld, imported %ld, released %ld\n", before, imported, after);
    printf("bytes that differ: %u\n", wrong);
    CHECK(kvb_window_close(window));
    CHECK(kvb_session_close(session));
    CHECK(kvb_profile_close(profile));
    CHECK(kvb_client_close(client));
    return wrong == 0 && imported > before && after == before ? 0 : 1;
}
