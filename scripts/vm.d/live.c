/* A client that lives through an upgrade of the daemon: holds KV, waits, and then sees what is left.
 *
 *   live FIFO     prints "holding"; after a line from FIFO checks its rows, and that growth says what has happened
 */
#include <kvbroker.h>

#include <stdio.h>
#include <string.h>

enum { ROW = 1024, TOKENS = 64 };

static int failed(int code, const char *what)
{
    char text[256];
    kvb_last_error(text, sizeof text);
    printf("live: %s: %s: %s\n", what, kvb_error_name(code), text);
    return 1;
}

int main(int argc, char **argv)
{
    kvb_client *client = NULL;
    kvb_profile *profile = NULL;
    kvb_session *session = NULL;
    kvb_geometry geometry = KVB_INIT(kvb_geometry);
    kvb_open_options open = KVB_INIT(kvb_open_options);
    unsigned char row[ROW], seen[ROW];
    char text[256];
    int code;

    if (argc != 2)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    geometry.name = "live";
    geometry.element = "f16";
    geometry.layers = 4;
    geometry.k_row = geometry.v_row = ROW;
    geometry.tokens_per_block = 16;
    if ((code = kvb_connect(NULL, NULL, &client)) != 0)
        return failed(code, "connect");
    if ((code = kvb_profile_new(client, &geometry, &profile)) != 0)
        return failed(code, "profile");
    if ((code = kvb_session_open(profile, &open, &session)) != 0)
        return failed(code, "open");
    if ((code = kvb_session_ensure(session, TOKENS)) != 0)
        return failed(code, "ensure");
    for (unsigned t = 0; t < TOKENS; t++) {
        memset(row, (int)t + 1, ROW);
        if ((code = kvb_session_write_row(session, t, 1, KVB_V, row, ROW)) != 0)
            return failed(code, "write");
    }
    puts("holding");

    FILE *fifo = fopen(argv[1], "r");
    if (!fifo || fgetc(fifo) == EOF)
        return 2;
    for (unsigned t = 0; t < TOKENS; t++) {
        memset(row, (int)t + 1, ROW);
        if ((code = kvb_session_read_row(session, t, 1, KVB_V, seen, ROW)) != 0)
            return failed(code, "read");
        if (memcmp(row, seen, ROW) != 0) {
            printf("live: the row of token %u is not what was written\n", t);
            return 1;
        }
    }
    puts("rows kept");
    /* Far beyond what credit covers: the broker that granted the rest has gone. */
    code = kvb_session_ensure(session, 100 * TOKENS);
    kvb_last_error(text, sizeof text);
    printf("growth: %s: %s\n", kvb_error_name(code), text);
    return 0;
}
