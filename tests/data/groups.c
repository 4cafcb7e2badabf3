/* A model of which four layers of six see the last 48 tokens only: what they hold, and attention over it. */
#include <kvbroker.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 6, WINDOW = 48, HEAD_DIM = 64, TOKENS = 400 };

#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        if ((call) < 0) {                                                                                              \
            char text[300];                                                                                            \
            kvb_last_error(text, sizeof text);                                                                         \
            fprintf(stderr, "line %d: %s\n", __LINE__, text);                                                          \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#define CHECK(what)                                                                                                    \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "line %d: not so: %s\n", __LINE__, #what);                                                 \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Value `i` of a token's row. */
static float value(size_t token, size_t i)
{
    return (float)((token * 37 + i * 11) % 101) / 50.0f - 1.0f;
}

static void write_token(kvb_session *session, size_t token)
{
    float row[HEAD_DIM];
    for (size_t i = 0; i < HEAD_DIM; i++)
        row[i] = value(token, i);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        MUST(kvb_session_write_row(session, token, layer, KVB_K, row, sizeof row));
        MUST(kvb_session_write_row(session, token, layer, KVB_V, row, sizeof row));
    }
}

/* Attention of one query over tokens first to end - 1, in the plainest way. */
static void expect(const float *q, size_t first, size_t end, double *out)
{
    double sum = 0.0;
    memset(out, 0, HEAD_DIM * sizeof *out);
    for (size_t token = first; token < end; token++) {
        double score = 0.0;
        for (size_t i = 0; i < HEAD_DIM; i++)
            score += q[i] * value(token, i);
        const double weight = exp(score / sqrt(HEAD_DIM));
        sum += weight;
        for (size_t i = 0; i < HEAD_DIM; i++)
            out[i] += weight * value(token, i);
    }
    for (size_t i = 0; i < HEAD_DIM; i++)
        out[i] /= sum;
}

int main(int argc, char **argv)
{
    static const uint32_t windows[LAYERS] = {WINDOW, WINDOW, 0, WINDOW, WINDOW, 0};
    kvb_client *client;
    kvb_profile *profile;
    kvb_session *session;
    kvb_embedded_options embedded = KVB_INIT(kvb_embedded_options);
    embedded.pool_bytes = 16 << 20;
    embedded.extent_bytes = 512 << 10;
    if (argc > 1)
        MUST(kvb_connect(argv[1], NULL, &client));
    else
        MUST(kvb_embedded(&embedded, NULL, &client));

    kvb_geometry geometry = KVB_INIT(kvb_geometry);
    geometry.name = "hybrid";
    geometry.element = "f32";
    geometry.layers = LAYERS;
    geometry.k_row = geometry.v_row = HEAD_DIM * sizeof(float);
    geometry.tokens_per_block = 16;
    geometry.windows = windows;
    MUST(kvb_profile_new(client, &geometry, &profile));
    kvb_profile_info info = KVB_INIT(kvb_profile_info);
    MUST(kvb_profile_get_info(profile, &info));
    CHECK(info.layers == LAYERS && info.groups == 2);

    kvb_open_options options = KVB_INIT(kvb_open_options);
    options.label = "groups";
    options.model = "m";
    options.max_tokens = TOKENS;
    MUST(kvb_session_open(profile, &options, &session));
    MUST(kvb_session_reserve(session, TOKENS, 1));
    uint32_t ids[TOKENS];
    for (size_t token = 0; token < TOKENS; token++) {
        ids[token] = (uint32_t)token;
        MUST(kvb_session_ensure(session, token + 1));
        write_token(session, token);
        kvb_stats stats = KVB_INIT(kvb_stats);
        MUST(kvb_session_stats(session, &stats));
        /* 8 KiB a block and layer: 2 layers keep all, 4 keep the window, which lies in 4 blocks at most. */
        const size_t blocks = token / 16 + 1;
        CHECK(stats.bytes_held <= (2 * blocks + 4 * 4) * 8192);
    }

    /* Each group has its own table; rows are found through it, and what a window has passed is not there. */
    kvb_map map = KVB_INIT(kvb_map), local = KVB_INIT(kvb_map);
    CHECK(kvb_session_map(session, &map) == KVB_ERR_INVALID);
    MUST(kvb_session_map_layer(session, 2, &map));
    MUST(kvb_session_map_layer(session, 4, &local));
    CHECK(map.first_token == 0 && local.first_token == 352 && kvb_session_first_token(session) == 352);
    kvb_plane plane;
    MUST(kvb_profile_plane(profile, 4, KVB_V, &plane));
    float got;
    memcpy(&got, kvb_row(&local, &plane, 399) + 5 * sizeof(float), sizeof got);
    CHECK(got == value(399, 5));
    float row[HEAD_DIM];
    CHECK(kvb_session_read_row(session, 100, 4, KVB_K, row, sizeof row) == KVB_ERR_INVALID);
    MUST(kvb_session_read_row(session, 100, 5, KVB_K, row, sizeof row));

    /* Attention masks by the layer's own window. */
    kvb_scratch *scratch;
    MUST(kvb_scratch_new(&scratch));
    float q[HEAD_DIM], out[HEAD_DIM];
    double right[HEAD_DIM];
    for (size_t i = 0; i < HEAD_DIM; i++)
        q[i] = value(7, i);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        kvb_attention_call call = KVB_INIT(kvb_attention_call);
        call.q = q;
        call.out = out;
        call.queries = 1;
        call.layer = layer;
        call.element = KVB_F32;
        call.query_heads = call.kv_heads = 1;
        call.head_dim = HEAD_DIM;
        MUST(kvb_attention(session, &call, scratch));
        expect(q, windows[layer] ? TOKENS - WINDOW : 0, TOKENS, right);
        for (size_t i = 0; i < HEAD_DIM; i++)
            CHECK(fabs(out[i] - right[i]) < 1e-4);
    }
    /* A wider one asks for what has gone. */
    kvb_attention_call call = KVB_INIT(kvb_attention_call);
    call.q = q, call.out = out, call.queries = 1, call.element = KVB_F32;
    call.query_heads = call.kv_heads = 1, call.head_dim = HEAD_DIM, call.window = 100;
    CHECK(kvb_attention(session, &call, scratch) == KVB_ERR_INVALID);

    /* The prefix is found with the window before its end, and the window has passed the tokens before. */
    CHECK(kvb_session_seal(session, ids, TOKENS) == TOKENS);
    CHECK(kvb_session_pin(session, TOKENS) == 25 + 3);
    CHECK(kvb_session_trim(session, 300) == KVB_ERR_INVALID);
    MUST(kvb_session_close(session));
    MUST(kvb_session_open(profile, &options, &session));
    CHECK(kvb_session_attach(session, ids, TOKENS) == TOKENS - 1);
    MUST(kvb_session_trim(session, 0));
    CHECK(kvb_session_tokens(session) == 0 && kvb_session_first_token(session) == 0);
    MUST(kvb_session_close(session));
    MUST(kvb_scratch_free(scratch));
    MUST(kvb_profile_close(profile));
    MUST(kvb_client_close(client));
    printf("all right\n");
    return 0;
}
