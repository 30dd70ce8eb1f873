/* rawc: the limit. An epoll server that answers the same three
 * requests with prebuilt bytes, exactly one send(2) per token per stream.
 * Single thread.  A stream whose socket is full is owed its tokens (bounded
 * memory) and continues on EPOLLOUT.
 *
 *   rawc PORT STEP_MS     (0 = as fast as possible)
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { SSE, CHUNKED, WS };
typedef struct st {
  int fd, mode, active, blocked, left, idx, wsopen, closing, final;
  uint64_t owed;
  char in[4096];
  int inl;
  char *frame;
  int flen, fown;
  const char *pend;
  int pendl;
} st;

static int ep;
static st **act;
static int nact = 0, cap = 0;
static char frame5[3][512];
static int frame5l[3];
static const char *head[2] = {
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n",
    "HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"};
static const char *tail[3] = {"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", "0\r\n\r\n", "\x88\x02\x03\xe8"};
static int taill[3] = {0, 0, 4};

static double nowd(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
static int build(int mode, int size, char *out) {
  char *tok = malloc(size + 1), *ev = malloc(size + 512);
  memset(tok, 'k', size);
  tok[0] = ' ';
  if (size == 5) memcpy(tok, " tokn", 5);
  tok[size] = 0;
  int n = 0;
  if (mode == WS) {
    out[n++] = (char)0x81;
    if (size < 126) out[n++] = size;
    else if (size < 65536) { out[n++] = 126; out[n++] = size >> 8; out[n++] = size & 255; }
    else { out[n++] = 127; for (int i = 7; i >= 0; i--) out[n++] = i < 4 ? size >> (8 * i) : 0; }
    memcpy(out + n, tok, size);
    n += size;
  } else {
    int l = mode == SSE ? sprintf(ev,
                                  "data: {\"id\":\"cmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":%ld,\"model\":\"m\","
                                  "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%s\"},\"finish_reason\":null}]}\n\n",
                                  (long)time(NULL), tok)
                        : sprintf(ev, "%s", tok);
    n = sprintf(out, "%x\r\n", l);
    memcpy(out + n, ev, l);
    n += l;
    out[n++] = '\r';
    out[n++] = '\n';
  }
  free(tok);
  free(ev);
  return n;
}
static void mod(st *s, uint32_t e) {
  struct epoll_event x = {.events = e, .data.ptr = s};
  epoll_ctl(ep, EPOLL_CTL_MOD, s->fd, &x);
}
static void deact(st *s) {
  if (!s->active) return;
  s->active = 0;
  st *l = act[--nact];
  act[s->idx] = l;
  l->idx = s->idx;
}
static void drop(st *s) {
  deact(s);
  close(s->fd);
  if (s->fown) free(s->frame);
  s->fd = -1;
  free(s);
}
static int put(st *s, const char *p, int n) { /* 1 sent, 0 blocked, -1 gone */
  ssize_t r = send(s->fd, p, n, MSG_NOSIGNAL);
  if (r == n) return 1;
  if (r < 0 && errno != EAGAIN) return -1;
  if (r < 0) r = 0;
  s->pend = p + r;
  s->pendl = n - r;
  s->blocked = 1;
  mod(s, EPOLLIN | EPOLLOUT);
  return 0;
}
static void fin(st *s) {
  deact(s);
  if (s->mode == WS) s->closing = 1;
  s->final = 0;
}
/* emit what is owed; stop when blocked */
static int pump(st *s) {
  while (s->owed && !s->blocked && s->left) {
    s->owed--;
    s->left--;
    if (put(s, s->frame, s->flen) < 0) return -1;
  }
  if (!s->left && !s->blocked) {
    int m = s->mode;
    fin(s);
    if (put(s, tail[m], taill[m]) < 0) return -1;
  }
  return 0;
}
static void begin(st *s, const char *body) {
  const char *k = strstr(body, "\"max_tokens\":"), *z = strstr(body, "\"size\":");
  s->left = k ? atoi(k + 13) : 1;
  int size = z ? atoi(z + 7) : 5;
  if (s->fown) free(s->frame);
  if (size == 5) s->frame = frame5[s->mode], s->flen = frame5l[s->mode], s->fown = 0;
  else s->frame = malloc(size + 512), s->flen = build(s->mode, size, s->frame), s->fown = 1;
  s->owed = 0;
  if (nact == cap) act = realloc(act, sizeof *act * (cap = cap ? cap * 2 : 1024));
  s->idx = nact;
  act[nact++] = s;
  s->active = 1;
}
static int input(st *s) {
  ssize_t r = recv(s->fd, s->in + s->inl, sizeof s->in - 1 - s->inl, 0);
  if (r < 0) return errno == EAGAIN ? 0 : -1;
  if (r == 0) return -1;
  s->inl += r;
  s->in[s->inl] = 0;
  if (s->wsopen) {
    unsigned char *p = (unsigned char *)s->in;
    if (s->inl < 6) return 0;
    int l = p[1] & 127, h = 2;
    if (l == 126) l = p[2] << 8 | p[3], h = 4;
    if (s->inl < h + 4 + l) return 0;
    if ((p[0] & 15) == 8) return -1; /* close (reply): close TCP */
    unsigned char *m = p + h, *d = m + 4;
    for (int i = 0; i < l; i++) d[i] ^= m[i & 3];
    d[l] = 0;
    s->inl = 0;
    if ((p[0] & 15) == 1) begin(s, (char *)d);
    return 0;
  }
  char *e = strstr(s->in, "\r\n\r\n");
  if (!e) return 0;
  if (!strncmp(s->in, "GET /ws", 7)) {
    s->mode = WS;
    s->wsopen = 1;
    s->inl = 0;
    /* the client's key is fixed; this is its accept value */
    const char *a = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                    "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";
    return put(s, a, strlen(a)) < 0 ? -1 : 0;
  }
  char *cl = strcasestr(s->in, "content-length:");
  int bl = cl ? atoi(cl + 15) : 0;
  if (s->in + s->inl - (e + 4) < bl) return 0;
  s->mode = strncmp(s->in, "POST /sse", 9) ? CHUNKED : SSE;
  s->inl = 0;
  if (put(s, head[s->mode], strlen(head[s->mode])) < 0) return -1;
  begin(s, e + 4);
  return 0;
}
int main(int argc, char **argv) {
  int port = argc > 1 ? atoi(argv[1]) : 8000;
  double step = argc > 2 ? atof(argv[2]) / 1000 : 0;
  signal(SIGPIPE, SIG_IGN);
  struct rlimit rl;
  getrlimit(RLIMIT_NOFILE, &rl);
  rl.rlim_cur = rl.rlim_max;
  setrlimit(RLIMIT_NOFILE, &rl);
  for (int m = 0; m < 3; m++) frame5l[m] = build(m, 5, frame5[m]);
  taill[0] = strlen(tail[0]);
  taill[1] = strlen(tail[1]);
  int ls = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
  setsockopt(ls, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(ls, (void *)&a, sizeof a) || listen(ls, 4096)) return perror("bind"), 1;
  ep = epoll_create1(0);
  struct epoll_event x = {.events = EPOLLIN, .data.ptr = NULL}, evs[512];
  epoll_ctl(ep, EPOLL_CTL_ADD, ls, &x);
  double next = 0;
  for (;;) {
    struct timespec to, *tp = NULL;
    double w = -1;
    if (nact) {
      w = step > 0 ? next - nowd() : 0;
      if (w < 0) w = 0;
      to.tv_sec = (long)w;
      to.tv_nsec = (w - (long)w) * 1e9;
      tp = &to;
    }
    int n = epoll_pwait2(ep, evs, 512, tp, NULL);
    int was = nact;
    for (int i = 0; i < n; i++) {
      st *s = evs[i].data.ptr;
      if (!s) {
        int fd;
        while ((fd = accept4(ls, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
          setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
          s = calloc(1, sizeof *s);
          s->fd = fd;
          struct epoll_event y = {.events = EPOLLIN, .data.ptr = s};
          epoll_ctl(ep, EPOLL_CTL_ADD, fd, &y);
        }
        continue;
      }
      int bad = 0;
      if (evs[i].events & EPOLLOUT && s->blocked) {
        s->blocked = 0;
        int pl = s->pendl;
        s->pendl = 0;
        int k = put(s, s->pend, pl);
        if (k < 0) bad = 1;
        else if (k) { mod(s, EPOLLIN); if (s->active && pump(s) < 0) bad = 1; }
      }
      if (!bad && evs[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) bad = input(s) < 0;
      if (bad) drop(s);
    }
    if (!nact) continue;
    if (step > 0) {
      double t = nowd();
      if (!was) next = t; /* first token at once */
      if (t < next) continue;
      next += step;
      if (next < t) next = t;
    }
    for (int i = nact - 1; i >= 0; i--) {
      st *s = act[i];
      s->owed++;
      if (!s->blocked && pump(s) < 0) drop(s);
    }
  }
}
