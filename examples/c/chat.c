/* Two conversations over one system prompt, with kvbroker holding the KV cache.
 *
 *   cc -std=c11 chat.c $(pkg-config --cflags --libs kvbroker) -lm -o chat
 *   ./chat                  the broker of this machine (KVBROKER_SOCKET, or its usual place)
 *   ./chat --embedded       no broker: a pool of this process's own
 *   ./chat /path/to.sock    the broker at this socket
 *
 * The "model" is a stand-in: K, V and Q are made of token ids, so that the program has nothing to load. All that
 * concerns the cache is as an engine would do it.
 */
#include <kvbroker.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, QUERY_HEADS = 4, KV_HEADS = 2, HEAD_DIM = 64, TOKENS_PER_BLOCK = 32 };
enum { KV_ROW = KV_HEADS * HEAD_DIM, Q_ROW = QUERY_HEADS * HEAD_DIM };
enum { SYSTEM_TOKENS = 3 * TOKENS_PER_BLOCK, QUESTION_TOKENS = 11, PROMPT = SYSTEM_TOKENS + QUESTION_TOKENS };

static void check_at(int64_t result, const char *what, int line)
{
    if (result >= 0)
        return;
    char text[512];
    kvb_last_error(text, sizeof text);
    fprintf(stderr, "chat.c:%d: %s: %s: %s\n", line, what, kvb_error_name((int)result), text);
    exit(1);
}
#define CHECK(call) check_at((call), #call, __LINE__)

static void must(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "chat.c: %s\n", what);
        exit(1);
    }
}

/* What a real model computes: here, some number that depends on where it is asked for. */
static float value_of(uint32_t token_id, size_t position, unsigned layer, unsigned plane, unsigned i)
{
    return sinf((float)(token_id * 7 + position * 3 + layer * 11 + plane * 5) + (float)i * 0.1f);
}

static void write_token(const kvb_map *map, const kvb_plane planes[LAYERS][2], size_t position, uint32_t id)
{
    float row[KV_ROW];
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        for (unsigned kv = KVB_K; kv <= KVB_V; kv++) {
            for (unsigned i = 0; i < KV_ROW; i++)
                row[i] = value_of(id, position, layer, kv, i);
            memcpy(kvb_row(map, &planes[layer][kv], position), row, sizeof row);
        }
    }
}

/* The last token's attention in every layer; `out` is [LAYERS][Q_ROW]. */
static void attend(const kvb_session *session, kvb_scratch *scratch, uint32_t id, float *out)
{
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        float q[Q_ROW];
        for (unsigned i = 0; i < Q_ROW; i++)
            q[i] = value_of(id, 0, layer, 2, i);
        kvb_attention_call call = KVB_INIT(kvb_attention_call);
        call.q = q;
        call.out = out + (size_t)layer * Q_ROW;
        call.queries = 1;
        call.layer = layer;
        call.element = KVB_F32;
        call.query_heads = QUERY_HEADS;
        call.kv_heads = KV_HEADS;
        call.head_dim = HEAD_DIM;
        CHECK(kvb_attention(session, &call, scratch));
    }
}

/* Prefill: whatever is there already is not computed again. Returns how many tokens were there. */
static size_t prefill(kvb_session *session, const kvb_plane planes[LAYERS][2], const uint32_t *ids, size_t count)
{
    const int64_t held = kvb_session_attach(session, ids, count);
    CHECK(held);
    /* The one place where the cache can say no, and nothing is lost yet: an engine would queue the request here. */
    CHECK(kvb_session_ensure(session, count));
    kvb_map map = KVB_INIT(kvb_map);
    CHECK(kvb_session_map(session, &map));
    for (size_t t = (size_t)held; t < count; t++)
        write_token(&map, planes, t, ids[t]);
    return (size_t)held;
}

/* One decoding step: room for one more token, its rows. */
static void step(kvb_session *session, const kvb_plane planes[LAYERS][2], uint32_t id)
{
    const int64_t tokens = kvb_session_tokens(session);
    CHECK(tokens);
    CHECK(kvb_session_ensure(session, (uint64_t)tokens + 1));
    kvb_map map = KVB_INIT(kvb_map);
    CHECK(kvb_session_map(session, &map)); /* the table may have moved */
    write_token(&map, planes, (size_t)tokens, id);
}

static void print_stats(const char *name, const kvb_session *session)
{
    kvb_stats stats = KVB_INIT(kvb_stats);
    CHECK(kvb_session_stats(session, &stats));
    printf("%-8s %4llu tokens, %llu private and %llu shared blocks of %llu KiB\n", name,
           (unsigned long long)stats.tokens, (unsigned long long)stats.blocks_private,
           (unsigned long long)stats.blocks_shared, (unsigned long long)stats.block_bytes >> 10);
}

int main(int argc, char **argv)
{
    must(kvb_abi_version() >= KVB_ABI_VERSION, "the library is older than the header");

    kvb_client *client = NULL;
    kvb_client_options options = KVB_INIT(kvb_client_options);
    options.label = "chat example";
    if (argc > 1 && strcmp(argv[1], "--embedded") == 0)
        CHECK(kvb_embedded(NULL, &options, &client));
    else
        CHECK(kvb_connect(argc > 1 ? argv[1] : NULL, &options, &client));
    kvb_client_info info = KVB_INIT(kvb_client_info);
    CHECK(kvb_client_get_info(client, &info));
    printf("kvbroker %s: %u extents of %llu KiB\n", kvb_version(), info.extents,
           (unsigned long long)info.extent_bytes >> 10);

    kvb_geometry geometry = KVB_INIT(kvb_geometry);
    geometry.name = "stand-in";
    geometry.element = "f32";
    geometry.layers = LAYERS;
    geometry.k_row = geometry.v_row = KV_ROW * sizeof(float);
    geometry.tokens_per_block = TOKENS_PER_BLOCK;
    kvb_profile *profile = NULL;
    CHECK(kvb_profile_new(client, &geometry, &profile));
    kvb_plane planes[LAYERS][2];
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t kv = KVB_K; kv <= KVB_V; kv++)
            CHECK(kvb_profile_plane(profile, layer, kv, &planes[layer][kv]));
    kvb_scratch *scratch = NULL;
    CHECK(kvb_scratch_new(&scratch));

    uint32_t ids[PROMPT];
    for (unsigned t = 0; t < PROMPT; t++)
        ids[t] = 1000 + t * 17 % 251;

    /* The first conversation computes the system prompt and keeps it for all that come. */
    kvb_open_options open = KVB_INIT(kvb_open_options);
    open.model = "stand-in, weights 1";
    open.label = "first";
    open.max_tokens = 2048;
    kvb_session *first = NULL;
    CHECK(kvb_session_open(profile, &open, &first));
    printf("first:   %zu of %d tokens were there\n", prefill(first, planes, ids, PROMPT), PROMPT);
    float out_first[LAYERS * Q_ROW], out_second[LAYERS * Q_ROW];
    attend(first, scratch, ids[PROMPT - 1], out_first);
    CHECK(kvb_session_seal(first, ids, SYSTEM_TOKENS));
    CHECK(kvb_session_pin(first, SYSTEM_TOKENS));

    /* The second one finds it, and gets the same attention from shared blocks, bit for bit. */
    open.label = "second";
    kvb_session *second = NULL;
    CHECK(kvb_session_open(profile, &open, &second));
    const size_t held = prefill(second, planes, ids, PROMPT);
    printf("second:  %zu of %d tokens were there\n", held, PROMPT);
    must(held == SYSTEM_TOKENS, "the system prompt was not shared");
    attend(second, scratch, ids[PROMPT - 1], out_second);
    must(memcmp(out_first, out_second, sizeof out_first) == 0, "a shared prefix changes the result");

    /* Two ways to go on from here: a fork shares all, and copies only the block that it writes in. */
    kvb_session *branch = NULL;
    CHECK(kvb_session_fork(second, &branch));
    step(second, planes, 1);
    step(branch, planes, 2);
    float row_second[KV_ROW], row_branch[KV_ROW];
    CHECK(kvb_session_read_row(second, PROMPT, 0, KVB_K, row_second, sizeof row_second));
    CHECK(kvb_session_read_row(branch, PROMPT, 0, KVB_K, row_branch, sizeof row_branch));
    must(row_second[0] == value_of(1, PROMPT, 0, KVB_K, 0) && row_branch[0] == value_of(2, PROMPT, 0, KVB_K, 0),
         "a fork writes into its sibling");

    /* A view: one plane in token order, as an engine with contiguous tensors wants it. It grows in place. */
    kvb_view view = KVB_INIT(kvb_view);
    CHECK(kvb_session_view(branch, 1, KVB_V, 512, NULL, &view));
    for (unsigned t = 0; t < 2 * TOKENS_PER_BLOCK; t++)
        step(branch, planes, 3 + t);
    const int64_t tokens = kvb_session_tokens(branch);
    CHECK(tokens);
    for (size_t t = 0; t < (size_t)tokens; t++) {
        float row[KV_ROW];
        CHECK(kvb_session_read_row(branch, t, 1, KVB_V, row, sizeof row));
        must(memcmp(view.address + t * view.row, row, sizeof row) == 0, "a view shows something else");
    }
    print_stats("first", first);
    print_stats("second", second);
    print_stats("branch", branch);

    /* Back to where the two parted. */
    CHECK(kvb_session_trim(branch, PROMPT));
    attend(branch, scratch, ids[PROMPT - 1], out_first);
    must(memcmp(out_first, out_second, sizeof out_first) == 0, "trimming changes what is left");
    print_stats("trimmed", branch);

    CHECK(kvb_session_close(branch));
    CHECK(kvb_session_close(second));
    CHECK(kvb_session_unpin(first, SYSTEM_TOKENS)); /* a server would leave it pinned */
    CHECK(kvb_session_close(first));
    kvb_room room = KVB_INIT(kvb_room);
    CHECK(kvb_profile_room(profile, &room));
    printf("room     %llu of %llu blocks are free\n", (unsigned long long)room.free,
           (unsigned long long)room.capacity);
    CHECK(kvb_scratch_free(scratch));
    CHECK(kvb_profile_close(profile));
    CHECK(kvb_client_close(client));
    return 0;
}
