/* A client of kvbrokerd in plain C, without the library: written from docs/protocol.md alone.
 * Usage: wire SOCKET. Says what went wrong and exits with 1, or exits with 0. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { HEADER = 24, MAX_MESSAGE = 65536, MAX_FDS = 253, REPLY = 0x8000 };
enum { HELLO = 1, PROFILE = 2, OPEN = 3, GROW = 5, TRIM = 6, FREE = 7, SEAL = 9, ATTACH = 11, RETURN_EXTENT = 12, QUERY = 13, CLOSE = 14 };
enum { TOKENS_PER_BLOCK = 16, ROW = 512, LAYERS = 2 };

static int sock;
static uint64_t sequence;
static uint8_t message[MAX_MESSAGE];
static size_t length;

/* The last reply. */
static uint8_t reply[MAX_MESSAGE];
static size_t reply_length;
static int fds[MAX_FDS];
static size_t fd_count;

static void must_at(int holds, const char *what, int line)
{
    if (!holds) {
        fprintf(stderr, "wire.c:%d: %s\n", line, what);
        exit(1);
    }
}
#define MUST(condition) must_at((condition), #condition, __LINE__)

static void put(uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        message[length++] = (uint8_t)(value >> 8 * i);
}

static void put_text(const char *text, size_t bytes)
{
    memset(message + length, 0, bytes);
    memcpy(message + length, text, strlen(text));
    length += bytes;
}

static uint64_t get(size_t at, size_t bytes)
{
    uint64_t value = 0;
    MUST(at + bytes <= reply_length);
    for (size_t i = 0; i < bytes; i++)
        value |= (uint64_t)reply[at + i] << 8 * i;
    return value;
}

static void start(unsigned verb, uint64_t session)
{
    length = 0;
    put(verb, 2);
    put(0, 2);
    put(0, 4); /* the length, when it is known */
    put(++sequence, 8);
    put(session, 8);
}

/* Sends the message and takes its reply. Returns the fault. */
static unsigned ask(void)
{
    const unsigned verb = message[0];
    const size_t end = length;
    length = 4;
    put(end, 4);
    length = end;
    MUST(send(sock, message, length, MSG_NOSIGNAL) == (ssize_t)length);
    for (;;) {
        union {
            struct cmsghdr align;
            char room[CMSG_SPACE(MAX_FDS * sizeof(int))];
        } control;
        struct iovec iov = {.iov_base = reply, .iov_len = sizeof reply};
        struct msghdr header = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        const ssize_t got = recvmsg(sock, &header, MSG_CMSG_CLOEXEC);
        MUST(got >= HEADER && !(header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)));
        reply_length = (size_t)got;
        fd_count = 0;
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
            MUST(c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS);
            fd_count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(fds, CMSG_DATA(c), fd_count * sizeof(int));
        }
        MUST(get(4, 4) == reply_length);
        if (get(8, 8) == 0)
            continue; /* an event */
        MUST(get(8, 8) == sequence && get(0, 2) == (verb | REPLY));
        return (unsigned)get(2, 2);
    }
}

static void put_report(uint64_t tokens, uint32_t first, uint32_t used)
{
    put(tokens, 8);
    put(first, 4);
    put(used, 4);
}

struct block {
    uint32_t extent, slot;
    uint64_t generation;
};

static void put_block(struct block b)
{
    put(b.extent, 4);
    put(b.slot, 4);
    put(b.generation, 8);
}

/* Block `i` of a grant that names `extents` extents. */
static struct block granted(size_t extents, size_t i)
{
    const size_t at = HEADER + 16 + 8 * extents + 24 * i;
    const struct block b = {(uint32_t)get(at, 4), (uint32_t)get(at + 4, 4), get(at + 8, 8)};
    return b;
}

static uint64_t open_session(uint32_t format, uint64_t max_tokens)
{
    start(OPEN, 0);
    put(format, 4);
    put(0, 4);
    put(max_tokens, 8);
    put_text("any 32 bytes will do for a model", 32);
    put_text("wire.c", 32);
    if (ask() != 0)
        return 0;
    MUST(reply_length == HEADER + 8 && get(HEADER, 8) == get(16, 8));
    return get(HEADER, 8);
}

int main(int argc, char **argv)
{
    MUST(argc == 2);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    MUST(strlen(argv[1]) < sizeof address.sun_path);
    strcpy(address.sun_path, argv[1]);
    sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    MUST(sock >= 0 && connect(sock, (const struct sockaddr *)&address, sizeof address) == 0);

    /* Nothing is answered before hello. */
    start(QUERY, 0);
    put(1, 4);
    put(0, 4);
    MUST(ask() == 5);

    start(HELLO, 0);
    memcpy(message + length, "KVBR", 4);
    length += 4;
    put(1, 4);
    put_text("wire.c", 32);
    MUST(ask() == 0 && reply_length == HEADER + 40);
    MUST(get(HEADER, 4) == 1 && get(HEADER + 4, 4) == getuid());
    const uint64_t extent_bytes = get(HEADER + 16, 8);
    const uint64_t page_bytes = get(HEADER + 28, 4);
    MUST(page_bytes == (uint64_t)sysconf(_SC_PAGESIZE) && extent_bytes % page_bytes == 0);

    start(PROFILE, 0);
    put(0, 4); /* plane-major */
    put(TOKENS_PER_BLOCK, 4);
    put(0, 4);
    put(LAYERS, 4);
    put_text("small", 32);
    put_text("f16", 16);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        put(layer, 4);
        put(ROW, 4);
        put(ROW, 4);
    }
    MUST(ask() == 0 && reply_length == HEADER + 24);
    const uint32_t format = (uint32_t)get(HEADER, 4);
    const uint64_t slot_bytes = get(HEADER + 8, 8), capacity = get(HEADER + 16, 8);
    MUST(slot_bytes >= (uint64_t)LAYERS * 2 * ROW * TOKENS_PER_BLOCK && slot_bytes % page_bytes == 0);
    MUST(get(HEADER + 4, 4) == extent_bytes / slot_bytes);

    /* What can never fit is refused at once, with numbers and words. */
    MUST(open_session(format, capacity * TOKENS_PER_BLOCK + 1) == 0);
    MUST(get(2, 2) == 1 && get(HEADER, 8) == capacity * TOKENS_PER_BLOCK + 1 && get(HEADER + 8, 8) == capacity * TOKENS_PER_BLOCK);
    MUST(reply_length > HEADER + 16 && memmem(reply + HEADER + 16, reply_length - HEADER - 16, "never fit", 9));

    const uint64_t session = open_session(format, 100);
    MUST(session > 0);

    /* Two blocks come, and the descriptor of their extent. */
    start(GROW, session);
    put_report(0, 0, 0);
    put(2, 4);
    put(2, 4);
    MUST(ask() == 0 && get(HEADER + 8, 4) == 1 && get(HEADER + 12, 4) == 2 && fd_count == 1);
    MUST(reply_length == HEADER + 16 + 8 + 2 * 24);
    const uint32_t extent = (uint32_t)get(HEADER + 16, 4);
    const struct block first = granted(1, 0), second = granted(1, 1);
    MUST(first.extent == extent && second.extent == extent && first.slot != second.slot);
    MUST(get(HEADER + 16 + 8 + 16, 4) == 1); /* it reads as zero */
    uint8_t *memory = mmap(NULL, extent_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    MUST(memory != MAP_FAILED);
    close(fds[0]);
    for (uint64_t i = 0; i < slot_bytes; i++)
        MUST(memory[first.slot * slot_bytes + i] == 0);

    /* 20 tokens: 16 in the first block, 4 in the second. The row of K or V of a layer, plane-major. */
    const struct block table[2] = {first, second};
    for (unsigned token = 0; token < 20; token++)
        for (unsigned plane = 0; plane < 2 * LAYERS; plane++) {
            const struct block b = table[token / TOKENS_PER_BLOCK];
            const uint64_t row = (uint64_t)plane * ROW * TOKENS_PER_BLOCK + token % TOKENS_PER_BLOCK * ROW;
            memset(memory + b.slot * slot_bytes + row, (int)(16 * plane + token), ROW);
        }

    /* They leave credit for the table with the next report; the full one is sealed. */
    start(SEAL, session);
    put_report(20, 0, 2);
    put(0, 4);
    put(TOKENS_PER_BLOCK, 4);
    for (uint32_t id = 0; id < TOKENS_PER_BLOCK; id++)
        put(1000 + id, 4);
    put_block(first);
    put_block(second);
    MUST(ask() == 0 && get(HEADER, 4) == 1 && get(HEADER + 4, 4) == 0);

    /* A second session finds it. The extent is here already, so no descriptor comes. */
    const uint64_t other = open_session(format, 0);
    start(ATTACH, other);
    put(TOKENS_PER_BLOCK + 1, 4);
    put(0, 4);
    for (uint32_t id = 0; id <= TOKENS_PER_BLOCK; id++)
        put(1000 + id, 4);
    MUST(ask() == 0 && get(HEADER, 8) == TOKENS_PER_BLOCK && get(HEADER + 8, 4) == 0 && get(HEADER + 12, 4) == 1 && fd_count == 0);
    const struct block shared = granted(0, 0);
    MUST(shared.extent == first.extent && shared.slot == first.slot && shared.generation == first.generation);
    MUST(get(HEADER + 16 + 16, 4) == 2); /* sealed */
    MUST(memory[shared.slot * slot_bytes + 3 * ROW * TOKENS_PER_BLOCK + 5 * ROW] == 16 * 3 + 5);

    /* What the table does not hold is nobody's to give back, and an extent in use stays. */
    start(FREE, 0);
    put(1, 4);
    put(0, 4);
    put_block(second);
    MUST(ask() == 5);
    start(RETURN_EXTENT, 0);
    put(extent, 4);
    put(0, 4);
    MUST(ask() == 5);

    /* The tail goes back to credit, is reported used again, and goes with the session. */
    start(TRIM, session);
    put_report(20, 2, 0);
    put(TOKENS_PER_BLOCK, 8);
    put(0, 4);
    put(0, 4);
    MUST(ask() == 0 && get(HEADER + 12, 4) == 1 && get(HEADER + 16 + 16, 4) == 4);
    MUST(granted(0, 0).generation == second.generation);
    start(CLOSE, other);
    put_report(TOKENS_PER_BLOCK, 1, 0);
    MUST(ask() == 0 && reply_length == HEADER);
    start(CLOSE, session);
    put_report(TOKENS_PER_BLOCK + 1, 1, 1);
    put_block(second);
    MUST(ask() == 0 && reply_length == HEADER);
    start(CLOSE, session);
    put_report(0, 0, 0);
    MUST(ask() == 4); /* stale */

    start(QUERY, 0);
    put(format, 4);
    put(0, 4);
    /* The sealed one is cached, and goes when somebody needs its place. */
    MUST(ask() == 0 && reply_length == HEADER + 24 && get(HEADER, 8) == capacity && get(HEADER + 8, 8) == capacity &&
         get(HEADER + 16, 8) == 1);

    /* Nobody uses the extent: it may go, once. */
    munmap(memory, extent_bytes);
    start(RETURN_EXTENT, 0);
    put(extent, 4);
    put(0, 4);
    const unsigned fault = ask();
    MUST(fault == 0 || fault == 4); /* stale where the broker has taken it back already */

    /* There is no verb 99; a wrong length ends the connection, with a refusal that names no request. */
    start(99, 0);
    MUST(ask() == 5);
    start(QUERY, 0);
    put(format, 4);
    put(0, 4);
    message[4] = 99;
    MUST(send(sock, message, length, MSG_NOSIGNAL) == (ssize_t)length);
    const ssize_t last = recv(sock, reply, sizeof reply, 0);
    reply_length = last > 0 ? (size_t)last : 0;
    MUST(get(0, 2) == REPLY && get(2, 2) == 5 && get(8, 8) == 0);
    MUST(recv(sock, reply, sizeof reply, 0) == 0);
    return 0;
}
