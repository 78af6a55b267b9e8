/* The client of bench_transport.py: it must never be the bottleneck, so it does nothing but read.
 *
 *   load HOST PORT MODE CONNECTIONS COUNT REQUEST_FILE
 *
 * MODE   stream  each connection sends the request COUNT times, one after the other, and reads each chunked answer to its end
 *        short   the same with answers that have a Content-Length
 *        paced   as stream; events carry the time they were due, as {"token":"<monotonic ns>"}: lateness is kept
 *        open    COUNT connections in all, CONNECTIONS at a time: connect, send, read the first event, close by reset
 *        hold    opens CONNECTIONS streams, waits until each has had its first event, prints a line, sleeps until stdin ends
 *
 * Prints one line of JSON: seconds, answers, events, bytes, cpu seconds used here, lateness percentiles in microseconds.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
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

enum { BUFFER = 1 << 18, TAIL = 64 };

struct connection {
    int fd, left, first;
    size_t kept;      /* bytes of an unfinished line or answer kept in tail */
    char tail[TAIL];
    size_t need;      /* short: bytes of body still to come */
    int in_head;
    uint64_t digits;  /* paced: the number being read */
    int match;        /* paced: how much of the key has been seen; -1 while digits come */
    char last;        /* the byte before this read */
};

static char *request;
static size_t request_size;
static struct sockaddr_in address;
static int epoll_fd;
static uint64_t events, answers, bytes;
static uint32_t *late;
static size_t late_count, late_room;

static void die(const char *what) { perror(what); exit(1); }

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
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
    size_t done = 0;
    c->in_head = 1;
    c->kept = 0;
    c->first = 0;
    c->last = 0;
    c->match = 0;
    while (done < request_size) {
        ssize_t n = write(c->fd, request + done, request_size - done);
        if (n < 0) die("write");
        done += (size_t)n;
    }
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

static void hang_up(struct connection *c) {
    struct linger reset = {1, 0};
    setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    close(c->fd);
    c->fd = -1;
}

/* Counts blank lines made of LF LF: each ends one event, and nothing else on the wire has them. */
static uint64_t count_events(struct connection *c, const char *data, size_t size) {
    uint64_t found = 0;
    char last = c->last;
    for (size_t i = 0; i < size; i++) {
        found += data[i] == '\n' && last == '\n';
        last = data[i];
    }
    c->last = last;
    return found;
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

/* Whether the last bytes are those that end a chunked body. */
static int chunked_end(struct connection *c, const char *data, size_t size) {
    static const char end[] = "0\r\n\r\n";
    char joined[TAIL * 2];
    size_t take = size < TAIL ? size : TAIL;
    memcpy(joined, c->tail, c->kept);
    memcpy(joined + c->kept, data + size - take, take);
    size_t all = c->kept + take, keep = all < 5 ? all : 5;
    memcpy(c->tail, joined + all - keep, keep);
    c->kept = keep;
    return keep == 5 && !memcmp(c->tail, end, 5);
}

static int short_end(struct connection *c, const char *data, size_t size) {
    if (c->in_head) {
        const char *end = memmem(data, size, "\r\n\r\n", 4);
        const char *length = strcasestr(data, "content-length:");
        if (!end || !length) { fprintf(stderr, "load: an answer's head came in pieces\n"); exit(1); }
        c->need = strtoul(length + 15, NULL, 10);
        size -= (size_t)(end + 4 - data);
        c->in_head = 0;
    }
    c->need -= size < c->need ? size : c->need;
    return c->need == 0;
}

static int by_value(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc != 7) { fprintf(stderr, "usage: load HOST PORT MODE CONNECTIONS COUNT REQUEST_FILE\n"); return 2; }
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)atoi(argv[2]));
    if (inet_pton(AF_INET, argv[1], &address.sin_addr) != 1) die("host");
    const char *mode = argv[3];
    int connections = atoi(argv[4]), count = atoi(argv[5]);
    int is_short = !strcmp(mode, "short"), is_paced = !strcmp(mode, "paced"), is_open = !strcmp(mode, "open"), is_hold = !strcmp(mode, "hold");
    FILE *file = fopen(argv[6], "rb");
    if (!file) die(argv[6]);
    request = malloc(1 << 16);
    request_size = fread(request, 1, 1 << 16, file);
    fclose(file);
    epoll_fd = epoll_create1(0);
    struct connection *all = calloc((size_t)connections, sizeof *all);
    static char buffer[BUFFER + 1];
    struct epoll_event ready[1024];
    int active = 0, opened = 0, waiting_first = 0;
    uint64_t begin = now_ns();
    for (int i = 0; i < connections && (!is_open || opened < count); i++) {
        all[i].left = count;
        dial(&all[i]);
        active++, opened++, waiting_first++;
    }
    while (active) {
        int n = epoll_wait(epoll_fd, ready, 1024, 30000);
        if (n == 0) { fprintf(stderr, "load: nothing came for 30 s, %d connections open\n", active); return 1; }
        for (int i = 0; i < n; i++) {
            struct connection *c = ready[i].data.ptr;
            ssize_t size = read(c->fd, buffer, BUFFER);
            if (size <= 0) { fprintf(stderr, "load: the server closed a connection (%zd)\n", size); return 1; }
            buffer[size] = 0;
            bytes += (uint64_t)size;
            if (is_short) {
                if (!short_end(c, buffer, (size_t)size)) continue;
            } else {
                uint64_t found = count_events(c, buffer, (size_t)size);
                if (is_paced) read_due(c, buffer, (size_t)size, now_ns());
                events += found;
                if (found && !c->first) {
                    c->first = 1;
                    waiting_first--;
                    if (is_open) {
                        answers++;
                        hang_up(c);
                        if (opened < count) { dial(c); opened++; waiting_first++; } else active--;
                        continue;
                    }
                }
                if (!chunked_end(c, buffer, (size_t)size)) continue;
            }
            answers++;
            if (--c->left > 0) { start(c); waiting_first++; } else { hang_up(c); active--; }
        }
        if (is_hold && waiting_first == 0) {
            printf("{\"held\": %d}\n", connections);
            fflush(stdout);
            while (read(0, buffer, BUFFER) > 0) {}
            return 0;
        }
    }
    double seconds = (double)(now_ns() - begin) / 1e9;
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    double cpu = (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) + (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6;
    qsort(late, late_count, sizeof *late, by_value);
    printf("{\"seconds\": %.6f, \"answers\": %lu, \"events\": %lu, \"bytes\": %lu, \"client_cpu\": %.6f, \"late_p50\": %u, \"late_p99\": %u}\n",
           seconds, answers, events, bytes, cpu, late_count ? late[late_count / 2] : 0, late_count ? late[late_count * 99 / 100] : 0);
    return 0;
}
