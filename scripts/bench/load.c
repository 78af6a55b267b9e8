/* The client of bench_transport.py: it must never be the bottleneck, so it does nothing but read and count.
 *
 *   load HOST PORT MODE CONNECTIONS MILLISECONDS REQUEST_FILE EVENTS
 *
 * MODE   stream  each connection sends the request again and again, and reads each chunked answer to its end
 *        short   the same with answers that have a Content-Length
 *        paced   as stream; events carry the time they were due, as {"token":"<monotonic ns>"}, and lateness is kept
 *        open    each connection is opened, sends, reads the first event, is closed by reset, and is opened anew
 *        hold    opens CONNECTIONS streams, of which each gets one event and then waits
 *
 * Warms up until every connection has had its first event (or answer), but for three seconds at most where answers follow each other
 * (some servers let new connections starve then; "cold" tells how many there were), and some time more, prints "begin", counts for MILLISECONDS, and
 * prints one line of JSON. (hold has no window: it tells how long the opening took.) Then the streams stay until stdin ends, so that
 * whoever measures the server can look at it in the same state at both ends. EVENTS is what each answer must have; 0: do not look.
 *
 * In its window it does not sleep: a client that sleeps is woken by an interrupt, which on a virtual machine costs the sending side twice
 * as much as the sending (13 µs against 35), and which a server that sends without a pause is spared. What it was busy with is told as
 * the time that had something to read.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 1 << 18, HEAD = 2048, AT_ONCE = 64 /* connections opened at a time: below every server's backlog */ };
static const uint64_t MS = 1000000, WARM = 300, PATIENCE = 3000, STALL = 60000;
static const char END[] = "0\r\n\r\n";

struct connection {
    int fd, in_head, warm;
    size_t head_size;
    char head[HEAD];
    long need;        /* bytes of a body with Content-Length still to come; -1: chunked */
    uint64_t events;  /* of this answer */
    int end;          /* how much of END the last bytes are */
    char last;        /* the byte before this read */
    int comment;      /* inside a heartbeat */
    uint64_t digits;  /* paced: the number being read */
    int match;        /* paced: how much of the key has been seen; -1 while digits come */
};

static char *request;
static size_t request_size;
static struct sockaddr_in address;
static int epoll_fd, is_paced, cold;
static uint64_t events, answers, bytes, redials, expected;
static uint32_t *late;
static size_t late_count, late_room;

static void die(const char *what) { perror(what); exit(1); }
static void fail(const char *what) { fprintf(stderr, "load: %s\n", what); exit(1); }

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 * MS + (uint64_t)t.tv_nsec;
}

static double cpu(void) {
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) + (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6;
}

static void keep_lateness(uint64_t due, uint64_t now) {
    if (late_count == late_room) {
        late_room = late_room ? late_room * 2 : 1 << 20;
        late = realloc(late, late_room * sizeof *late);
        if (!late) die("realloc");
    }
    late[late_count++] = now > due ? (uint32_t)((now - due) / 1000) : 0;
}

static void start(struct connection *c) {
    c->in_head = 1, c->head_size = 0, c->events = 0, c->end = 0, c->last = 0, c->comment = 0, c->match = 0;
    if (write(c->fd, request, request_size) != (ssize_t)request_size) die("write");
}

static void dial(struct connection *c) {
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0) die("socket");
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address)) die("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &e)) die("epoll_ctl");
    start(c);
}

static void hang_up(struct connection *c) { /* by reset: no TIME_WAIT eats the ports */
    struct linger reset = {1, 0};
    setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    close(c->fd);
}

/* Takes the head's bytes; returns how many of data they are. */
static size_t read_head(struct connection *c, const char *data, size_t size) {
    size_t before = c->head_size, take = size < HEAD - 1 - before ? size : HEAD - 1 - before;
    memcpy(c->head + before, data, take);
    c->head[c->head_size = before + take] = 0;
    char *end = strstr(c->head, "\r\n\r\n");
    if (!end) {
        if (c->head_size == HEAD - 1) fail("an answer's head is too long");
        return size;
    }
    end[2] = 0;
    if (strncmp(c->head, "HTTP/1.1 200", 12)) { fprintf(stderr, "load: %s\n", c->head); exit(1); }
    char *length = strcasestr(c->head, "\r\ncontent-length:");
    c->need = length ? strtol(length + 17, NULL, 10) : -1;
    if (!length && !strcasestr(c->head, "\r\ntransfer-encoding: chunked")) fail("an answer is neither chunked nor has a length");
    c->in_head = 0;
    return (size_t)(end + 4 - c->head) - before;
}

/* Events and comments end in LF LF, which nothing else on the wire has; a chunked body ends in END, which cannot occur in an event. */
static int read_chunked(struct connection *c, const char *data, size_t size) {
    uint64_t found = 0;
    char last = c->last;
    int end = c->end;
    for (size_t i = 0; i < size; i++) {
        char byte = data[i];
        if (last == '\n') {
            if (byte == ':') c->comment = 1;
            else if (byte == '\n') found += !c->comment, c->comment = 0;
        }
        if (end || byte == '0') end = byte == END[end] ? end + 1 : byte == '0';
        last = byte;
    }
    c->last = last, c->end = end, c->events += found, events += found;
    return end == 5;
}

static void read_due(struct connection *c, const char *data, size_t size, uint64_t now) {
    static const char key[] = "\"token\":\"";
    for (size_t i = 0; i < size; i++) {
        if (c->match >= 0) {
            c->match = data[i] == key[c->match] ? c->match + 1 : data[i] == key[0];
            if (key[c->match] == 0) c->match = -1, c->digits = 0;
        } else if (data[i] >= '0' && data[i] <= '9') {
            c->digits = c->digits * 10 + (uint64_t)(data[i] - '0');
        } else {
            keep_lateness(c->digits, now);
            c->match = 0;
        }
    }
}

/* Whether the answer has ended. */
static int take(struct connection *c, const char *data, size_t size) {
    bytes += size;
    if (c->in_head) {
        size_t head = read_head(c, data, size);
        data += head, size -= head;
        if (c->in_head) return 0;
    }
    if (c->need >= 0) return (c->need -= (long)size) <= 0;
    if (is_paced) read_due(c, data, size, now_ns());
    int ended = read_chunked(c, data, size);
    if (ended && expected && c->events != expected) {
        fprintf(stderr, "load: an answer had %lu events, not %lu\n", c->events, expected);
        exit(1);
    }
    return ended;
}

static int by_value(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void report(double seconds, double used) {
    qsort(late, late_count, sizeof *late, by_value);
    printf("{\"seconds\": %.6f, \"answers\": %lu, \"events\": %lu, \"bytes\": %lu, \"client_cpu\": %.6f, \"redials\": %lu, "
           "\"cold\": %d, \"late_p50\": %u, \"late_p99\": %u}\n", seconds, answers, events, bytes, used, redials, cold,
           late_count ? late[late_count / 2] : 0, late_count ? late[late_count * 99 / 100] : 0);
    fflush(stdout);
    char byte;
    while (read(0, &byte, 1) > 0) {}
    exit(0);
}

int main(int argc, char **argv) {
    if (argc != 8) fail("usage: load HOST PORT MODE CONNECTIONS MILLISECONDS REQUEST_FILE EVENTS");
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)atoi(argv[2]));
    if (inet_pton(AF_INET, argv[1], &address.sin_addr) != 1) fail("HOST must be an IPv4 address");
    const char *mode = argv[3];
    int connections = cold = atoi(argv[4]), dialled = 0;
    uint64_t window = (uint64_t)atoi(argv[5]) * MS;
    expected = (uint64_t)atoi(argv[7]);
    int is_open = !strcmp(mode, "open"), is_hold = !strcmp(mode, "hold");
    is_paced = !strcmp(mode, "paced");
    FILE *file = fopen(argv[6], "rb");
    if (!file) die(argv[6]);
    request = malloc(1 << 16);
    request_size = fread(request, 1, 1 << 16, file);
    fclose(file);
    epoll_fd = epoll_create1(0);
    struct connection *all = calloc((size_t)connections, sizeof *all);
    static char buffer[BUFFER];
    static struct epoll_event ready[1024];
    uint64_t launch = now_ns(), begin = 0, heard = launch, warm_at = 0;
    uint64_t before = launch, idle = 0; /* ns in which there was nothing to read */
    int measuring = 0;
    while (dialled < connections && dialled < AT_ONCE) dial(&all[dialled++]);
    for (;;) {
        int n = epoll_wait(epoll_fd, ready, 1024, measuring ? 0 : 5);
        uint64_t now = now_ns();
        if (n > 0) heard = now;
        else idle += now - before;
        before = now;
        if (now - heard > STALL * MS) fail("nothing came for a minute");
        if (measuring && now - begin >= window) report((double)(now - begin) / 1e9, (double)(now - begin - idle) / 1e9);
        if (!measuring && (cold == 0 || (!is_paced && !is_hold && now - launch >= PATIENCE * MS))) {
            if (is_hold) { puts("begin"); fflush(stdout); report((double)(now - launch) / 1e9, cpu()); }
            if (!warm_at) warm_at = now;
            if (now - warm_at >= WARM * MS) {
                puts("begin");
                fflush(stdout);
                measuring = 1, events = answers = bytes = late_count = 0, begin = before = now_ns(), idle = 0;
            }
        }
        for (int i = 0; i < n; i++) {
            struct connection *c = ready[i].data.ptr;
            ssize_t size = read(c->fd, buffer, BUFFER);
            if (size <= 0) { /* some servers end a connection after so many requests: fair between two answers */
                if (!c->in_head || c->head_size) fail("the server closed a connection in the middle of an answer");
                close(c->fd);
                redials++;
                dial(c);
                continue;
            }
            int ended = take(c, buffer, (size_t)size);
            if (!c->warm && (c->events || ended)) {
                c->warm = 1, cold--;
                if (dialled < connections) dial(&all[dialled++]);
            }
            if (is_open && c->events) {
                answers++;
                hang_up(c);
                dial(c);
            } else if (ended) {
                answers++;
                if (is_open || is_hold || is_paced) fail("a stream ended that should not");
                start(c);
            }
        }
    }
}
