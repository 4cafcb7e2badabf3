/* Everything that a C program can get wrong, and the exact code that it gets for it. Runs over an embedded pool of four
 * extents of 128 KiB: 16 blocks of 32 KiB. tests/c_api.rs compiles and runs it. argv[1]: a file that is no model. */
#include <kvbroker.h>

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;

static void expect_at(int64_t got, int64_t want, const char *words, const char *call, int line)
{
    char text[512];
    const size_t length = kvb_last_error(text, sizeof text);
    if (got != want) {
        fprintf(stderr, "misuse.c:%d: %s gave %lld, not %lld (%s)\n", line, call, (long long)got, (long long)want, text);
        failures++;
    } else if (want < 0) {
        kvb_error info = KVB_INIT(kvb_error);
        if (kvb_last_error_info(&info) != 0 || info.code != got || length != strlen(text) || !strstr(text, words)) {
            fprintf(stderr, "misuse.c:%d: %s: code %d, text: %s; it should say: %s\n", line, call, info.code, text, words);
            failures++;
        }
    }
}
#define EXPECT(call, code, words) expect_at((call), (code), (words), #call, __LINE__)
#define OK(call) expect_at((call), 0, "", #call, __LINE__)

static void numbers_at(uint64_t needed, uint64_t available, int line)
{
    kvb_error info = KVB_INIT(kvb_error);
    OK(kvb_last_error_info(&info));
    if (info.needed != needed || info.available != available) {
        fprintf(stderr, "misuse.c:%d: needed %llu, available %llu\n", line, (unsigned long long)info.needed,
                (unsigned long long)info.available);
        failures++;
    }
}
#define NUMBERS(needed, available) numbers_at((needed), (available), __LINE__)

static void *other_thread(void *unused)
{
    (void)unused;
    char text[8] = "kept";
    /* This thread has failed nowhere yet. */
    if (kvb_last_error(text, sizeof text) != 0 || text[0] != 0)
        return "an error of another thread is seen";
    return NULL;
}

/* Every function with a NULL where something must be: the text names what it is. */
static void nothing_given(kvb_client *client, kvb_profile *profile, kvb_session *session)
{
    kvb_client *no_client = NULL;
    kvb_profile *no_profile = NULL;
    kvb_session *no_session = NULL;
    kvb_window *no_window = NULL;
    kvb_client_info client_info = KVB_INIT(kvb_client_info);
    kvb_profile_info profile_info = KVB_INIT(kvb_profile_info);
    kvb_plane plane;
    kvb_room room = KVB_INIT(kvb_room);
    kvb_map map = KVB_INIT(kvb_map);
    kvb_view view = KVB_INIT(kvb_view);
    kvb_stats stats = KVB_INIT(kvb_stats);
    kvb_window_options options = KVB_INIT(kvb_window_options);
    kvb_window_info window_info = KVB_INIT(kvb_window_info);
    kvb_batch batch = KVB_INIT(kvb_batch);
    uint32_t id = 1;
    char row[4];
#define NAMES(call, words) EXPECT(call, KVB_ERR_INVALID, words)
    NAMES(kvb_connect(NULL, NULL, NULL), "out is NULL");
    NAMES(kvb_client_get_info(NULL, &client_info), "client is NULL");
    NAMES(kvb_profile_from_model(NULL, "m", NULL, 0, &no_profile), "client is NULL");
    NAMES(kvb_profile_from_model(client, "m", NULL, 0, NULL), "out is NULL");
    NAMES(kvb_profile_new(client, NULL, NULL), "out is NULL");
    NAMES(kvb_profile_get_info(NULL, &profile_info), "profile is NULL");
    NAMES(kvb_profile_get_info(profile, NULL), "out is NULL");
    NAMES(kvb_profile_plane(NULL, 0, KVB_K, &plane), "profile is NULL");
    NAMES(kvb_profile_room(NULL, &room), "profile is NULL");
    NAMES(kvb_profile_room(profile, NULL), "out is NULL");
    NAMES(kvb_profile_reserve(NULL, 1), "profile is NULL");
    NAMES(kvb_profile_release_credit(NULL), "profile is NULL");
    NAMES(kvb_session_reserve(NULL, 1, 1), "session is NULL");
    NAMES(kvb_session_writable(NULL, 0, 1), "session is NULL");
    NAMES(kvb_session_tokens(NULL), "session is NULL");
    NAMES(kvb_session_first_token(NULL), "session is NULL");
    NAMES(kvb_session_wanted_back(NULL), "session is NULL");
    NAMES(kvb_session_damaged_from(NULL), "session is NULL");
    NAMES(kvb_session_trim(NULL, 0), "session is NULL");
    NAMES(kvb_session_trim_head(NULL, 0), "session is NULL");
    NAMES(kvb_session_set_rewind(NULL, 0), "session is NULL");
    NAMES(kvb_session_fork(NULL, &no_session), "session is NULL");
    NAMES(kvb_session_seal(NULL, &id, 1), "session is NULL");
    NAMES(kvb_session_attach(NULL, &id, 1), "session is NULL");
    NAMES(kvb_session_attach(session, NULL, 1), "ids is NULL");
    NAMES(kvb_session_pin(NULL, 16), "session is NULL");
    NAMES(kvb_session_unpin(NULL, 16), "session is NULL");
    NAMES(kvb_session_write_row(NULL, 0, 0, KVB_K, row, sizeof row), "session is NULL");
    NAMES(kvb_session_read_row(NULL, 0, 0, KVB_K, row, sizeof row), "session is NULL");
    NAMES(kvb_session_read_row(session, 0, 0, KVB_K, NULL, 512), "row is NULL");
    NAMES(kvb_session_map(NULL, &map), "session is NULL");
    NAMES(kvb_session_map_layer(NULL, 0, &map), "session is NULL");
    NAMES(kvb_session_map_layer(session, 0, NULL), "out is NULL");
    NAMES(kvb_session_view(NULL, 0, KVB_K, 16, NULL, &view), "session is NULL");
    NAMES(kvb_session_stats(NULL, &stats), "session is NULL");
    NAMES(kvb_session_stats(session, NULL), "out is NULL");
    NAMES(kvb_session_window(NULL, &options, &no_window), "session is NULL");
    NAMES(kvb_session_window(session, NULL, &no_window), "options is NULL");
    NAMES(kvb_session_window(session, &options, NULL), "out is NULL");
    NAMES(kvb_window_get_info(NULL, &window_info), "window is NULL");
    NAMES(kvb_window_declined(NULL, row, sizeof row), "window is NULL");
    NAMES(kvb_window_extend(NULL, session, 16), "window is NULL");
    NAMES(kvb_window_is_current(NULL, session), "window is NULL");
    NAMES(kvb_window_take_device(NULL), "window is NULL");
    NAMES(kvb_window_load(NULL, session, 0, &batch), "window is NULL");
    NAMES(kvb_window_load(NULL, session, 0, NULL), "out is NULL");
    NAMES(kvb_window_batch(NULL, session, 0, &batch), "window is NULL");
    NAMES(kvb_window_drain(NULL, session, &batch), "window is NULL");
    NAMES(kvb_window_drain(NULL, session, NULL), "batch is NULL");
    NAMES(kvb_window_release(NULL, &batch), "window is NULL");
    NAMES(kvb_window_release(NULL, NULL), "batch is NULL");
    EXPECT((int64_t)(no_client || no_profile || no_session || no_window), 0, "");
}

/* Every structure with a size that no version of it has: the text names the structure. */
static void wrong_sizes(kvb_client *client, kvb_profile *profile, kvb_session *session)
{
    kvb_client *no_client = NULL;
    kvb_profile *no_profile = NULL;
    kvb_session *no_session = NULL;
    kvb_window *no_window = NULL;
    kvb_client_options client_options = {0};
    kvb_client_info client_info = {0};
    kvb_geometry geometry = {0};
    kvb_profile_info profile_info = {0};
    kvb_open_options open = {0};
    kvb_map map = {0};
    kvb_view view = {0};
    kvb_window_options window = {0};
    kvb_error error = {0};
    client_options.size = client_info.size = geometry.size = profile_info.size = open.size = map.size = view.size = 3;
    window.size = error.size = 3;
    NAMES(kvb_connect("/nonexistent", &client_options, &no_client), "kvb_client_options.size is 3");
    NAMES(kvb_client_get_info(client, &client_info), "kvb_client_info.size is 3");
    NAMES(kvb_profile_new(client, &geometry, &no_profile), "kvb_geometry.size is 3");
    NAMES(kvb_profile_get_info(profile, &profile_info), "kvb_profile_info.size is 3");
    NAMES(kvb_session_open(profile, &open, &no_session), "kvb_open_options.size is 3");
    NAMES(kvb_session_map(session, &map), "kvb_map.size is 3");
    NAMES(kvb_session_map_layer(session, 0, &map), "kvb_map.size is 3");
    NAMES(kvb_session_view(session, 0, KVB_K, 256, NULL, &view), "kvb_view.size is 3");
    NAMES(kvb_session_window(session, &window, &no_window), "kvb_window_options.size is 3");
    NAMES(kvb_last_error_info(&error), "kvb_error.size is 3");
    EXPECT((int64_t)(no_client || no_profile || no_session || no_window || map.base || view.address), 0, "");
}

/* The largest number in every place for one, on a session of 208 tokens: a code, and the session as it was. */
static void too_much(kvb_profile *profile, kvb_session *session)
{
    const uint64_t most = UINT64_MAX;
    uint32_t id = 1;
    unsigned char row[512];
    kvb_map map = KVB_INIT(kvb_map);
    kvb_view view = KVB_INIT(kvb_view);
    kvb_admission may = KVB_INIT(kvb_admission);
    kvb_window *window = NULL;
    kvb_window_options options = KVB_INIT(kvb_window_options);
    EXPECT(kvb_profile_reserve(profile, UINT32_MAX), KVB_ERR_NEVER_FITS, "4294967295 blocks");
    EXPECT(kvb_session_reserve(session, most, most), KVB_ERR_NEVER_FITS, "");
    EXPECT(kvb_session_admit(session, most, most, 0, &may), KVB_ERR_NEVER_FITS, "more than one sequence can have");
    NAMES(kvb_session_writable(session, most, most), "208");
    NAMES(kvb_session_trim(session, most), "cannot trim");
    NAMES(kvb_session_trim_head(session, most), "cannot drop");
    NAMES(kvb_session_seal(session, &id, SIZE_MAX), "ids: ");
    NAMES(kvb_session_attach(session, &id, SIZE_MAX), "ids: ");
    EXPECT(kvb_session_pin(session, most), KVB_ERR_BAD_REQUEST, "sealed blocks");
    NAMES(kvb_session_write_row(session, most, 0, KVB_K, row, sizeof row), "the session holds 0..208");
    NAMES(kvb_session_read_row(session, most, 0, KVB_K, row, sizeof row), "the session holds 0..208");
    NAMES(kvb_session_read_row(session, 0, UINT32_MAX, KVB_K, row, sizeof row), "layer 4294967295 of 2");
    NAMES(kvb_session_read_row(session, 0, 0, KVB_K, row, SIZE_MAX), "for a row of 512");
    NAMES(kvb_session_map_layer(session, UINT32_MAX, &map), "layer 4294967295 of 2");
    NAMES(kvb_session_view(session, 0, KVB_K, most, NULL, &view), "more than there are addresses for");
    options.end = most;
    NAMES(kvb_session_window(session, &options, &window), "the session holds 0..208");
    options.first = most;
    NAMES(kvb_session_window(session, &options, &window), "which are none");
    EXPECT(kvb_session_tokens(session), 208, "");
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return 2;
    char nothing[4] = "abc";
    EXPECT((int64_t)kvb_last_error(nothing, sizeof nothing), 0, "");
    EXPECT(nothing[0], 0, "");

    /* --- clients */
    kvb_client *client = NULL;
    EXPECT(kvb_embedded(NULL, NULL, NULL), KVB_ERR_INVALID, "out is NULL");
    kvb_embedded_options pool = {0};
    EXPECT(kvb_embedded(&pool, NULL, &client), KVB_ERR_INVALID, "kvb_embedded_options.size is 0");
    pool.size = sizeof pool - 1;
    EXPECT(kvb_embedded(&pool, NULL, &client), KVB_ERR_INVALID, "sizeof(kvb_embedded_options)");
    pool.size = (size_t)-1;
    EXPECT(kvb_embedded(&pool, NULL, &client), KVB_ERR_INVALID, "size");
    pool.size = sizeof pool;
    pool.extent_bytes = 1000;
    EXPECT(kvb_embedded(&pool, NULL, &client), KVB_ERR_INVALID, "whole number of pages");
    pool.extent_bytes = 128 << 10;
    pool.pool_bytes = 64 << 10;
    EXPECT(kvb_embedded(&pool, NULL, &client), KVB_ERR_INVALID, "at least one extent");
    EXPECT((int64_t)(client == NULL), 1, "");
    /* A program of tomorrow: fields behind those that this library knows. */
    struct {
        kvb_embedded_options known;
        uint64_t tomorrow;
    } newer;
    memset(&newer, 0, sizeof newer);
    newer.known.size = sizeof newer;
    newer.known.extent_bytes = 128 << 10;
    newer.known.pool_bytes = 512 << 10;
    newer.tomorrow = 7;
    EXPECT(kvb_embedded(&newer.known, NULL, &client), KVB_ERR_UNSUPPORTED, "does not know");
    newer.tomorrow = 0;
    kvb_client_options options = KVB_INIT(kvb_client_options);
    options.label = "\xff\xfe";
    EXPECT(kvb_embedded(&newer.known, &options, &client), KVB_ERR_INVALID, "not UTF-8");
    options.label = "misuse";
    options.credit_ahead = KVB_NO_CREDIT_AHEAD;
    OK(kvb_embedded(&newer.known, &options, &client));
    kvb_client *nobody = NULL;
    EXPECT(kvb_connect("/nonexistent/kvbroker.sock", NULL, &nobody), KVB_ERR_NOT_REACHABLE, "start kvbrokerd");
    kvb_error info = KVB_INIT(kvb_error);
    OK(kvb_last_error_info(&info));
    EXPECT(info.os_error, 2, ""); /* ENOENT */
    EXPECT(kvb_connect("/a/name/that/is/far/too/long/for/a/socket/address/as/unix/has/them/a/name/that/is/far/too/"
                       "long/for/a/socket/address",
                       NULL, &nobody),
           KVB_ERR_NOT_REACHABLE, "");
    EXPECT(kvb_client_event_fd(client), KVB_ERR_UNSUPPORTED, "embedded");
    EXPECT(kvb_client_event_fd(NULL), KVB_ERR_INVALID, "client is NULL");
    EXPECT(kvb_client_poll(NULL), KVB_ERR_INVALID, "client is NULL");
    OK(kvb_client_poll(client));
    EXPECT(kvb_client_get_info(client, NULL), KVB_ERR_INVALID, "out is NULL");
    kvb_client_info about = KVB_INIT(kvb_client_info);
    OK(kvb_client_get_info(client, &about));
    EXPECT(about.extents, 4, "");
    EXPECT(about.embedded, 1, "");
    EXPECT(kvb_last_error_info(NULL), KVB_ERR_INVALID, "out is NULL");
    /* A short buffer gets the start of the text, and its whole length. */
    char little[6];
    EXPECT((int64_t)kvb_last_error(little, sizeof little), 11, "");
    EXPECT(strcmp(little, "out i"), 0, "");
    EXPECT((int64_t)kvb_last_error(NULL, 0), 11, "");
    EXPECT(strcmp(kvb_error_name(KVB_ERR_NEVER_FITS), "never-fits"), 0, "");
    EXPECT(strcmp(kvb_error_name(12345), "unknown"), 0, "");
    /* An output structure of tomorrow: what this library does not know becomes zero. */
    struct {
        kvb_client_info known;
        uint64_t tomorrow;
    } wide;
    memset(&wide, 0xaa, sizeof wide);
    wide.known.size = sizeof wide;
    OK(kvb_client_get_info(client, &wide.known));
    EXPECT((int64_t)wide.tomorrow, 0, "");
    EXPECT((int64_t)wide.known.size, sizeof wide, "");

    /* --- profiles: 2 layers of 512-byte rows, 16 tokens: 32 KiB blocks */
    kvb_profile *profile = NULL;
    kvb_geometry g = KVB_INIT(kvb_geometry);
    EXPECT(kvb_profile_new(client, NULL, &profile), KVB_ERR_INVALID, "geometry is NULL");
    EXPECT(kvb_profile_new(NULL, &g, &profile), KVB_ERR_INVALID, "client is NULL");
    g.tokens_per_block = 16;
    EXPECT(kvb_profile_new(client, &g, &profile), KVB_ERR_INVALID, "no layers");
    g.layers = 2;
    EXPECT(kvb_profile_new(client, &g, &profile), KVB_ERR_INVALID, "K row of 0 bytes");
    g.k_row = g.v_row = 512;
    g.layers = 5000;
    EXPECT(kvb_profile_new(client, &g, &profile), KVB_ERR_INVALID, "5000 layers");
    g.layers = 2;
    g.tokens_per_block = 17;
    EXPECT(kvb_profile_new(client, &g, &profile), KVB_ERR_INVALID, "power of two");
    g.tokens_per_block = 16;
    g.layout = 9;
    EXPECT(kvb_profile_new(client, &g, &profile), KVB_ERR_INVALID, "layout 9");
    g.layout = KVB_PLANE_MAJOR;
    g.tokens_per_block = 128;
    EXPECT(kvb_profile_new(client, &g, &profile), KVB_ERR_NEVER_FITS, "fewer tokens per block");
    NUMBERS(256 << 10, 128 << 10);
    g.tokens_per_block = 16;
    const kvb_layer same[2] = {{3, 512, 512}, {3, 512, 512}};
    g.rows = same;
    EXPECT(kvb_profile_new(client, &g, &profile), KVB_ERR_INVALID, "k_row and v_row must be 0");
    g.k_row = g.v_row = 0;
    EXPECT(kvb_profile_new(client, &g, &profile), KVB_ERR_INVALID, "ascend");
    EXPECT((int64_t)(profile == NULL), 1, "");
    const kvb_layer rows[2] = {{3, 512, 512}, {7, 256, 0}};
    g.rows = rows;
    OK(kvb_profile_new(client, &g, &profile));
    kvb_plane plane;
    OK(kvb_profile_plane(profile, 1, KVB_K, &plane));
    EXPECT((int64_t)plane.row, 256, "");
    EXPECT((int64_t)plane.offset, 16 * 1024, "");
    OK(kvb_profile_close(profile));
    g.rows = NULL;
    g.k_row = g.v_row = 512;
    profile = NULL;
    EXPECT(kvb_profile_from_model(client, argv[1], "f16", 16, &profile), KVB_ERR_INVALID, argv[1]);
    EXPECT(kvb_profile_from_model(client, argv[1], "f17", 16, &profile), KVB_ERR_INVALID, "f17");
    EXPECT(kvb_profile_from_model(client, NULL, NULL, 0, &profile), KVB_ERR_INVALID, "path is NULL");
    OK(kvb_profile_new(client, &g, &profile));
    EXPECT(kvb_profile_plane(profile, 2, KVB_K, &plane), KVB_ERR_INVALID, "layer 2 of 2");
    EXPECT(kvb_profile_plane(profile, 0, 2, &plane), KVB_ERR_INVALID, "KVB_V is 1");
    EXPECT(kvb_profile_plane(profile, 0, KVB_K, NULL), KVB_ERR_INVALID, "out is NULL");
    EXPECT(kvb_profile_reserve(profile, 17), KVB_ERR_NEVER_FITS, "17 blocks");
    NUMBERS(17, 16);
    OK(kvb_profile_reserve(profile, 4));
    kvb_room room = KVB_INIT(kvb_room);
    OK(kvb_profile_room(profile, &room));
    EXPECT((int64_t)room.capacity, 16, "");
    EXPECT((int64_t)room.credit, 4, "");
    EXPECT((int64_t)room.held, 4, "");
    OK(kvb_profile_release_credit(profile));
    EXPECT(kvb_profile_room(NULL, &room), KVB_ERR_INVALID, "profile is NULL");
    room.size = 3;
    EXPECT(kvb_profile_room(profile, &room), KVB_ERR_INVALID, "kvb_room.size is 3");

    /* --- sessions */
    kvb_session *a = NULL, *b = NULL, *twin = NULL;
    kvb_open_options open = KVB_INIT(kvb_open_options);
    open.flags = 0x80;
    EXPECT(kvb_session_open(profile, &open, &a), KVB_ERR_INVALID, "flags 0x80");
    open.flags = 0;
    open.max_tokens = 16 * 16 + 1;
    EXPECT(kvb_session_open(profile, &open, &a), KVB_ERR_NEVER_FITS, "257 tokens");
    NUMBERS(257, 256);
    open.max_tokens = 0;
    open.model = "m";
    EXPECT(kvb_session_open(profile, &open, NULL), KVB_ERR_INVALID, "out is NULL");
    EXPECT(kvb_session_open(NULL, &open, &a), KVB_ERR_INVALID, "profile is NULL");
    OK(kvb_session_open(profile, &open, &a));
    OK(kvb_session_open(profile, &open, &b));
    OK(kvb_session_ensure(a, 13 * 16));
    OK(kvb_session_ensure(b, 2 * 16));
    EXPECT(kvb_session_ensure(b, 4 * 16), KVB_ERR_BUSY, "2 blocks are needed, 1 can be granted");
    NUMBERS(2, 1);
    EXPECT(kvb_session_tokens(b), 32, "");
    kvb_admission may = {0};
    EXPECT(kvb_session_admit(b, 48, 1, 0, &may), KVB_ERR_INVALID, "kvb_admission.size is 0");
    may.size = sizeof may;
    EXPECT(kvb_session_admit(b, 48, 1, 8, &may), KVB_ERR_INVALID, "flags 0x8");
    EXPECT(kvb_session_admit(b, 48, 1, 0, NULL), KVB_ERR_INVALID, "out is NULL");
    EXPECT(kvb_session_admit(NULL, 48, 1, 0, &may), KVB_ERR_INVALID, "session is NULL");
    EXPECT((int64_t)may.verdict, 0, "");
    OK(kvb_session_admit(b, 48, 1, 0, &may));
    EXPECT((int64_t)may.verdict, KVB_ADMITTED, "");
    OK(kvb_session_admit(b, 17 * 16, 1, KVB_MAY_EVICT, &may));
    EXPECT((int64_t)may.verdict, KVB_TOO_LONG, "");
    EXPECT((int64_t)may.blocks, 1, "");
    /* Who asks says what its table has: the broker knows a's blocks from here on. */
    OK(kvb_session_admit(a, 13 * 16, 1, 0, &may));
    OK(kvb_session_admit(b, 64, 1, 0, &may));
    EXPECT((int64_t)may.verdict, KVB_WHEN_YOURS_FREE, "");
    EXPECT((int64_t)may.blocks, 1, "");
    /* The last free block is b's still, until b gives its promise back. */
    EXPECT(kvb_session_ensure(a, 14 * 16), KVB_ERR_BUSY, "1 blocks are needed, 0 can be granted");
    OK(kvb_session_admit(b, 0, 0, 0, &may));
    EXPECT((int64_t)may.verdict, KVB_ADMITTED, "");
    OK(kvb_session_ensure(a, 14 * 16));
    OK(kvb_session_trim(a, 13 * 16));
    OK(kvb_profile_release_credit(profile));
    EXPECT(kvb_session_ensure(b, 17 * 16), KVB_ERR_NEVER_FITS, "never fit");
    EXPECT(kvb_session_ensure(b, UINT64_MAX), KVB_ERR_NEVER_FITS, "");
    EXPECT(kvb_session_ensure(NULL, 1), KVB_ERR_INVALID, "session is NULL");
    EXPECT(kvb_session_trim(a, 209), KVB_ERR_INVALID, "cannot trim to 209");
    EXPECT(kvb_session_trim_head(a, 209), KVB_ERR_INVALID, "cannot drop 209");
    EXPECT(kvb_session_writable(a, 5, 3), KVB_ERR_INVALID, "5..3");
    EXPECT(kvb_session_writable(a, 0, 209), KVB_ERR_INVALID, "0..209");
    nothing_given(client, profile, a);
    wrong_sizes(client, profile, a);
    too_much(profile, a);
    unsigned char row[512] = {1};
    OK(kvb_session_write_row(a, 0, 1, KVB_V, row, sizeof row));
    EXPECT(kvb_session_write_row(a, 208, 1, KVB_V, row, sizeof row), KVB_ERR_INVALID, "208..209");
    EXPECT(kvb_session_write_row(a, 0, 2, KVB_V, row, sizeof row), KVB_ERR_INVALID, "layer 2 of 2");
    EXPECT(kvb_session_write_row(a, 0, 1, 5, row, sizeof row), KVB_ERR_INVALID, "kv 5: KVB_K is 0");
    EXPECT(kvb_session_write_row(a, 0, 1, KVB_V, row, 100), KVB_ERR_INVALID, "100 bytes for a row of 512");
    EXPECT(kvb_session_write_row(a, 0, 1, KVB_V, NULL, 512), KVB_ERR_INVALID, "row is NULL");
    EXPECT(kvb_session_read_row(a, 208, 1, KVB_V, row, sizeof row), KVB_ERR_INVALID, "tokens 208..209");
    EXPECT(kvb_session_read_row(a, 0, 2, KVB_V, row, sizeof row), KVB_ERR_INVALID, "layer 2 of 2");
    EXPECT(kvb_session_read_row(a, 0, 1, KVB_V, row, 100), KVB_ERR_INVALID, "100 bytes for a row of 512");
    EXPECT(row[0], 1, ""); /* refused calls have not touched it */
    uint32_t ids[48];
    for (unsigned i = 0; i < 48; i++)
        ids[i] = i;
    EXPECT(kvb_session_seal(b, ids, 48), KVB_ERR_INVALID, "48 token ids");
    EXPECT(kvb_session_seal(b, NULL, 4), KVB_ERR_INVALID, "ids is NULL");
    EXPECT(kvb_session_pin(a, 32), KVB_ERR_BAD_REQUEST, "0 sealed blocks");
    EXPECT(kvb_session_seal(a, ids, 48), 48, "");
    EXPECT(kvb_session_pin(a, 48), 3, "");
    EXPECT(kvb_session_pin(a, 48), 0, "");
    EXPECT(kvb_session_unpin(a, 48), 3, "");
    EXPECT(kvb_session_write_row(a, 0, 1, KVB_V, row, sizeof row), KVB_ERR_INVALID, "make it writable first");
    EXPECT(kvb_session_attach(b, ids, 48), KVB_ERR_INVALID, "holds 32 tokens already");
    EXPECT(kvb_session_fork(a, NULL), KVB_ERR_INVALID, "out is NULL");
    OK(kvb_session_fork(b, &twin));
    OK(kvb_session_close(twin));
    kvb_stats stats = {0};
    EXPECT(kvb_session_stats(a, &stats), KVB_ERR_INVALID, "kvb_stats.size is 0");
    EXPECT(kvb_session_map(a, NULL), KVB_ERR_INVALID, "out is NULL");
    kvb_view view = KVB_INIT(kvb_view);
    EXPECT(kvb_session_view(a, 9, KVB_K, 256, NULL, &view), KVB_ERR_INVALID, "layer 9 of 2");
    EXPECT(kvb_session_view(a, 0, KVB_K, 16, NULL, &view), KVB_ERR_INVALID, "holds 208 already");
    EXPECT(kvb_session_view(a, 0, KVB_K, 256, (void *)0x1001, &view), KVB_ERR_INVALID, "whole number of pages");
    EXPECT(kvb_session_view(a, 0, KVB_K, 16 * 70000, NULL, &view), KVB_ERR_TOO_MANY_MAPPINGS, "70001 mappings");
    EXPECT(kvb_session_view(a, 0, KVB_K, 256, NULL, NULL), KVB_ERR_INVALID, "out is NULL");
    OK(kvb_session_view(a, 0, KVB_K, 256, NULL, &view));

    /* --- attention: 2 KV heads of 128, f16, over the 512-byte rows */
    kvb_scratch *scratch = NULL;
    EXPECT(kvb_scratch_new(NULL), KVB_ERR_INVALID, "out is NULL");
    OK(kvb_scratch_new(&scratch));
    static float q[4 * 128], out[4 * 128];
    kvb_attention_call call = KVB_INIT(kvb_attention_call);
    call.q = q;
    call.out = out;
    call.queries = 1;
    call.query_heads = 4;
    call.kv_heads = 2;
    call.head_dim = 128;
    OK(kvb_attention(a, &call, scratch));
    EXPECT(kvb_attention(NULL, &call, scratch), KVB_ERR_INVALID, "session is NULL");
    EXPECT(kvb_attention(a, NULL, scratch), KVB_ERR_INVALID, "call is NULL");
    EXPECT(kvb_attention(a, &call, NULL), KVB_ERR_INVALID, "scratch is NULL");
#define WITH(field, value, words)                                      \
    do {                                                               \
        kvb_attention_call wrong = call;                               \
        wrong.field = value;                                           \
        EXPECT(kvb_attention(a, &wrong, scratch), KVB_ERR_INVALID, words); \
    } while (0)
    WITH(size, 8, "kvb_attention_call.size is 8");
    WITH(q, NULL, "q is NULL");
    WITH(out, NULL, "out is NULL");
    WITH(q, (const float *)((const char *)q + 1), "not aligned");
    WITH(out, q, "overlap");
    WITH(queries, 209, "209 queries");
    WITH(queries, UINT64_MAX, "queries");
    WITH(kv_tokens, 209, "over 209 tokens");
    WITH(layer, 2, "layer 2 of 2");
    WITH(element, 7, "element 7");
    WITH(element, KVB_F32, "do not fill the rows");
    WITH(query_heads, 3, "multiple of KV heads");
    WITH(kv_heads, 0, "none may be 0");
    WITH(head_dim, 0, "none may be 0");
    WITH(head_dim, UINT32_MAX, "do not fill the rows");
    WITH(kv_head_count, 3, "KV heads 0..3 of 2");
    WITH(first_kv_head, 2, "KV heads");
    WITH(scale, NAN, "scale is NaN");
    EXPECT(kvb_session_trim_head(a, 40), 32, "");
    EXPECT(kvb_session_first_token(a), 32, "");
    EXPECT(kvb_attention(a, &call, scratch), KVB_ERR_INVALID, "before 32 have been dropped");
    call.window = 100;
    OK(kvb_attention(a, &call, scratch));
    EXPECT(kvb_session_read_row(a, 31, 0, KVB_K, row, sizeof row), KVB_ERR_INVALID, "32..208");

    /* --- other threads, other processes */
    pthread_t thread;
    void *seen = NULL;
    pthread_create(&thread, NULL, other_thread, NULL);
    pthread_join(thread, &seen);
    if (seen) {
        fprintf(stderr, "%s\n", (const char *)seen);
        failures++;
    }
    fflush(stderr);
    const pid_t child = fork();
    if (child == 0) {
        failures = 0;
        EXPECT(kvb_session_ensure(a, 1), KVB_ERR_FORKED, "forked");
        EXPECT(kvb_session_tokens(a), KVB_ERR_FORKED, "forked");
        EXPECT(kvb_attention(a, &call, scratch), KVB_ERR_FORKED, "forked");
        EXPECT(kvb_session_close(a), KVB_ERR_FORKED, "forked");
        EXPECT(kvb_profile_close(profile), KVB_ERR_FORKED, "forked");
        EXPECT(kvb_client_close(client), KVB_ERR_FORKED, "forked");
        EXPECT(kvb_scratch_free(scratch), KVB_ERR_FORKED, "forked");
        kvb_client *own = NULL;
        OK(kvb_embedded(&newer.known, NULL, &own));
        OK(kvb_client_close(own));
        _exit(failures);
    }
    int child_status = -1;
    waitpid(child, &child_status, 0);
    EXPECT(child_status, 0, "");
    EXPECT(kvb_session_tokens(a), 208, ""); /* the parent is as it was */

    /* --- NULL may be closed, and the order does not matter */
    OK(kvb_session_close(NULL));
    OK(kvb_profile_close(NULL));
    OK(kvb_client_close(NULL));
    OK(kvb_scratch_free(NULL));
    OK(kvb_window_close(NULL));
    OK(kvb_client_close(client));
    OK(kvb_profile_close(profile));
    OK(kvb_session_ensure(b, 3 * 16));
    OK(kvb_session_close(b));
    OK(kvb_session_close(a));
    OK(kvb_scratch_free(scratch));
    return failures ? 1 : 0;
}
