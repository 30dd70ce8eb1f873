/* sload: a streaming load client for servers on this machine; one thread, epoll.
 *
 * Opens N connections, waits --settle seconds so that the server has accepted them, sends one streaming request on
 * each at once, and reads every answer to its end. It checks each: the number of tokens, the bytes of their text
 * where only they are sent, [DONE] or the close frame. One JSON object on stdout; exit code 1 if a stream went wrong.
 *
 *   sload --mode sse|chunked|ws --port P --n N --k K [options]
 *
 *   --n, --k, --size   streams; tokens of each; bytes of a token (5)
 *   --path             of the request that the peers take: a POST with {"max_tokens", "size"}, or a WebSocket with
 *                      that JSON as its first message (default: /sse, /chunked or /ws)
 *   --request FILE     the whole request, sent as it is in place of that
 *   --message FILE     the first message of a WebSocket, in place of that JSON
 *   --lead, --trail    SSE events before the first token and behind the last one that are no tokens (0)
 *   --pid              the server, whose CPU time is read, its children's included
 *   --step-ms          the server's pace, for the jitter
 *   --settle, --max-time   seconds
 *
 * A chunk is a token in chunked mode, an event in SSE, a message on a WebSocket. `ttft_ms`: request sent, or on a
 * WebSocket its first message, to the first token read. `gap_ms`: between tokens of one stream. `steady`: from the
 * moment when every stream has a token to the end of the first stream. The client never sleeps, so that the server's
 * send(2) doesn't pay for waking a sleeping reader.
 *
 * build: cc -O2 -Wall -o sload sload.c
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { M_CHUNKED, M_SSE, M_WS };
enum { S_IDLE, S_CONNECTING, S_READY, S_HEAD, S_BODY, S_WSCLOSING };
/* chunked decoder states */
enum { C_SIZE, C_EXT, C_LF, C_DATA, C_DCR, C_DLF, C_TRAILER, C_DONE };
enum { B_CHUNKED, B_LENGTH, B_EOF };
enum { E_CONNECT, E_RESET, E_EOF, E_STATUS, E_PARSE, E_SHORT, E_NODONE, E_WS, E_TIMEOUT, E_BYTES, E_N };
static const char *ename[E_N] = {"connect", "reset", "early_eof", "status", "parse",
                                 "token_count", "no_done", "ws", "timeout", "payload_bytes"};

#define HEADMAX 4096

typedef struct {
  int fd, state;
  uint64_t t_req, t_last, t_close;
  uint32_t tokens;
  uint64_t payload;
  /* output */
  const char *out;
  size_t outlen;
  char ctl[160];
  size_t ctllen;
  /* response head */
  char head[HEADMAX];
  int headlen;
  int bodykind;
  int64_t remain;
  /* chunked */
  int cst, cdig;
  uint64_t crem;
  int crlfs;
  /* sse */
  char line[24];
  int linelen, evdata, evdone, sawdone, lead, trail;
  /* ws */
  unsigned char wh[14];
  int whl;
  uint64_t wrem;
  int wop, wfin, wctl_len, wmsg;
  char wctl[128];
  int got_first;
} conn;

/* options */
static const char *o_path = NULL, *o_reqfile = NULL, *o_msgfile = NULL;
static int o_port = 0, o_mode = M_SSE, o_n = 1, o_pid = 0, o_k = 256, o_size = 5, o_lead = 0, o_trail = 0;
static double o_max = 30, o_step = -1, o_settle = 0;

static struct sockaddr_in addr;
static char *g_req;
static size_t g_reqlen;
static char *g_wsframe;
static size_t g_wsframelen;

static int ep, active = 0;
static conn *C;
static uint64_t finished = 0, errors = 0, err[E_N], tokens = 0, payload = 0, wire = 0, chunks = 0, lateclose = 0;
static uint64_t t_start, t_firstreq, t_lasttok;
static int firsts = 0;
/* steady window: from "every stream has its first token" to "the first stream ended" */
static int w_state = 0;
static double w_cpu0, w_cpu1;
static uint64_t w_tok0, w_tok1, w_t0, w_t1;

static uint32_t *ttft, *hs;
static size_t nttft = 0, nhs = 0, cttft = 0, chs = 0;
#define GAPMAX 4000000 /* microseconds */
static uint32_t *gaph;
static uint64_t ngap = 0, maxgap = 0, gapsum = 0;

static inline uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000ull + t.tv_nsec;
}
static void die(const char *f, ...) {
  va_list a;
  va_start(a, f);
  vfprintf(stderr, f, a);
  va_end(a);
  fputc('\n', stderr);
  exit(2);
}
static void push(uint32_t **a, size_t *n, size_t *c, uint32_t v) {
  if (*n == *c) {
    *c = *c ? *c * 2 : 4096;
    *a = realloc(*a, *c * sizeof **a);
  }
  (*a)[(*n)++] = v;
}

/* ---------- server process tree: CPU and RSS ---------- */
typedef struct {
  double cpu;
  long rss_kb;
  int nproc;
} usage;
static int tree(int root, int *out, int max) {
  int n = 0;
  out[n++] = root;
  /* snapshot of (pid, ppid), then close over the root */
  static int ps[32768], pp[32768];
  int m = 0;
  DIR *d = opendir("/proc");
  struct dirent *e;
  while (d && (e = readdir(d))) {
    if (!isdigit((unsigned char)e->d_name[0])) continue;
    char p[64], b[512];
    snprintf(p, sizeof p, "/proc/%.20s/stat", e->d_name);
    FILE *f = fopen(p, "r");
    if (!f) continue;
    size_t l = fread(b, 1, sizeof b - 1, f);
    fclose(f);
    b[l] = 0;
    char *q = strrchr(b, ')');
    if (!q || m >= 32768) continue;
    int ppid = 0;
    char st;
    if (sscanf(q + 2, "%c %d", &st, &ppid) == 2) ps[m] = atoi(e->d_name), pp[m++] = ppid;
  }
  if (d) closedir(d);
  for (int i = 0; i < n; i++)
    for (int j = 0; j < m; j++)
      if (pp[j] == out[i] && n < max) out[n++] = ps[j];
  return n;
}
/* CPU of the tree found by the last full sample: cheap enough to call mid-run */
static int g_pids[256], g_npids = 0;
static double quick_cpu(void) {
  double s = 0;
  for (int i = 0; i < g_npids; i++) {
    struct timespec ts;
    clockid_t ck;
    if (clock_getcpuclockid(g_pids[i], &ck) == 0 && clock_gettime(ck, &ts) == 0) s += ts.tv_sec + ts.tv_nsec * 1e-9;
  }
  return s;
}
static usage sample(int root) {
  usage u = {0};
  if (!root) return u;
  u.nproc = g_npids = tree(root, g_pids, 256);
  u.cpu = quick_cpu();
  for (int i = 0; i < g_npids; i++) {
    char p[64], ln[256];
    long v;
    snprintf(p, sizeof p, "/proc/%d/smaps_rollup", g_pids[i]);
    FILE *f = fopen(p, "r");
    while (f && fgets(ln, sizeof ln, f))
      if (sscanf(ln, "Rss: %ld", &v) == 1) u.rss_kb += v;
    if (f) fclose(f);
  }
  return u;
}

/* ---------- connection life ---------- */
static void ev(conn *c, uint32_t e, int op) {
  struct epoll_event x = {.events = e, .data.ptr = c};
  epoll_ctl(ep, op, c->fd, &x);
}
static void reset_stream(conn *c) {
  c->t_req = c->t_last = c->t_close = 0;
  c->tokens = 0;
  c->payload = 0;
  c->headlen = 0;
  c->bodykind = B_EOF;
  c->remain = 0;
  c->cst = C_SIZE;
  c->cdig = 0;
  c->crem = 0;
  c->crlfs = 0;
  c->linelen = c->evdata = c->evdone = c->sawdone = c->lead = c->trail = 0;
  c->whl = 0;
  c->wrem = 0;
  c->wop = c->wmsg = 0;
  c->ctllen = 0;
  c->got_first = 0;
}
static void open_conn(conn *c) {
  reset_stream(c);
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  if (c->fd < 0) die("socket: %s", strerror(errno));
  int one = 1;
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  c->state = S_CONNECTING;
  if (connect(c->fd, (void *)&addr, sizeof addr) < 0 && errno != EINPROGRESS) die("connect: %s", strerror(errno));
  ev(c, EPOLLOUT, EPOLL_CTL_ADD);
}
static void close_conn(conn *c) {
  if (c->fd >= 0) close(c->fd);
  c->fd = -1;
  c->state = S_IDLE;
}
static void flush_out(conn *c);
static void start_request(conn *c) {
  active++;
  c->out = g_req;
  c->outlen = g_reqlen;
  c->state = S_HEAD;
  c->t_req = now();
  if (!t_firstreq) t_firstreq = c->t_req;
  flush_out(c);
}
static void wrong(const conn *c, int why) { /* of the first one, how the answer began */
  if (!errors) fprintf(stderr, "%s: %.300s\n", ename[why], c->head);
  errors++;
  err[why]++;
}
static void fail(conn *c, int why) {
  wrong(c, why);
  active--;
  close_conn(c);
}
static void window_close(void) {
  if (w_state == 1) {
    w_state = 2;
    w_cpu1 = quick_cpu();
    w_tok1 = tokens;
    w_t1 = now();
  } else if (w_state == 0)
    w_state = 3; /* a stream ended before the last one began: no window */
}
static void done(conn *c) {
  window_close();
  int bad = -1;
  if (c->tokens != (uint32_t)o_k || c->trail != o_trail) bad = E_SHORT;
  else if (o_mode == M_SSE && !c->sawdone) bad = E_NODONE;
  else if (o_mode != M_SSE && c->payload != (uint64_t)o_k * o_size) bad = E_BYTES;
  if (bad >= 0) wrong(c, bad);
  else finished++;
  active--;
  if (o_mode == M_WS) { /* the server closes TCP, by RFC 6455 section 7.1.1 */
    c->state = S_WSCLOSING;
    c->t_close = now();
  } else close_conn(c);
}
static void flush_out(conn *c) {
  while (c->outlen) {
    ssize_t r = send(c->fd, c->out, c->outlen, MSG_NOSIGNAL);
    if (r < 0) {
      if (errno == EAGAIN) {
        ev(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
        return;
      }
      return; /* the read side reports it */
    }
    c->out += r;
    c->outlen -= r;
  }
  ev(c, EPOLLIN, EPOLL_CTL_MOD);
}
static void ws_control(conn *c, int op, const char *p, size_t n) {
  char f[160];
  if (n > 125) n = 125;
  f[0] = 0x80 | op;
  f[1] = 0x80 | n;
  memcpy(f + 2, "\x11\x22\x33\x44", 4);
  for (size_t i = 0; i < n; i++) f[6 + i] = p[i] ^ ("\x11\x22\x33\x44"[i & 3]);
  ssize_t r = send(c->fd, f, n + 6, MSG_NOSIGNAL);
  (void)r;
}

static inline void token(conn *c, uint64_t t) {
  c->tokens++;
  tokens++;
  t_lasttok = t;
  if (!c->got_first) {
    c->got_first = 1;
    firsts++;
    push(&ttft, &nttft, &cttft, (uint32_t)((t - c->t_req) / 1000));
  } else {
    uint64_t g = (t - c->t_last) / 1000;
    ngap++;
    gapsum += g;
    if (g > maxgap) maxgap = g;
    gaph[g < GAPMAX ? g : GAPMAX - 1]++;
  }
  c->t_last = t;
}

/* SSE line parser; returns 0 */
static void sse_feed(conn *c, const char *p, size_t n, uint64_t t) {
  while (n) {
    const char *nl = memchr(p, '\n', n);
    size_t l = nl ? (size_t)(nl - p) : n;
    size_t room = sizeof c->line - 1 - (size_t)c->linelen, cp = l < room ? l : room;
    memcpy(c->line + c->linelen, p, cp);
    c->linelen += cp;
    if (!nl) return;
    c->line[c->linelen] = 0;
    if (c->linelen && c->line[c->linelen - 1] == '\r' && cp == l) c->line[--c->linelen] = 0;
    if (c->linelen == 0) {
      if (c->evdata) {
        if (c->evdone) c->sawdone = 1;
        else if (c->lead < o_lead) c->lead++;
        else if (o_trail && c->tokens == (uint32_t)o_k) c->trail++;
        else token(c, t);
      }
      c->evdata = c->evdone = 0;
    } else if (!strncmp(c->line, "data:", 5)) {
      const char *v = c->line + 5;
      if (*v == ' ') v++;
      c->evdata = 1;
      if (!strcmp(v, "[DONE]")) c->evdone = 1;
    }
    c->linelen = 0;
    p += l + 1;
    n -= l + 1;
  }
}
static void payload_feed(conn *c, const char *p, size_t n, uint64_t t) {
  payload += n;
  c->payload += n;
  if (o_mode == M_SSE) sse_feed(c, p, n, t);
}

/* feed a chunked body; returns 1 done, 0 more, -1 error */
static int chunk_feed(conn *c, const char *p, size_t n, uint64_t t) {
  const char *e = p + n;
  while (p < e) {
    switch (c->cst) {
      case C_SIZE: {
        int ch = (unsigned char)*p++, d;
        if (ch >= '0' && ch <= '9') d = ch - '0';
        else if ((ch | 32) >= 'a' && (ch | 32) <= 'f') d = (ch | 32) - 'a' + 10;
        else if (ch == '\r' && c->cdig) { c->cst = C_LF; break; }
        else if ((ch == ';' || ch == ' ') && c->cdig) { c->cst = C_EXT; break; }
        else return -1;
        c->crem = c->crem * 16 + d;
        if (++c->cdig > 15) return -1;
        break;
      }
      case C_EXT: if (*p++ == '\r') c->cst = C_LF; break;
      case C_LF:
        if (*p++ != '\n') return -1;
        c->cdig = 0;
        if (c->crem == 0) { c->cst = C_TRAILER; c->crlfs = 0; }
        else { c->cst = C_DATA; chunks++; }
        break;
      case C_DATA: {
        size_t l = e - p < (ptrdiff_t)c->crem ? (size_t)(e - p) : c->crem;
        payload_feed(c, p, l, t);
        p += l;
        c->crem -= l;
        if (!c->crem) {
          c->cst = C_DCR;
          if (o_mode == M_CHUNKED) token(c, t);
        }
        break;
      }
      case C_DCR: if (*p++ != '\r') return -1; c->cst = C_DLF; break;
      case C_DLF: if (*p++ != '\n') return -1; c->cst = C_SIZE; break;
      case C_TRAILER: /* read lines until an empty one */
        if (*p == '\n') {
          p++;
          if (c->crlfs == 0) { c->cst = C_DONE; return 1; }
          c->crlfs = 0;
        } else { if (*p != '\r') c->crlfs++; p++; }
        break;
      default: return -1;
    }
  }
  return c->cst == C_DONE;
}

/* WebSocket frames; returns 1 close received, 0 more, -1 error */
static int ws_feed(conn *c, const char *p, size_t n, uint64_t t) {
  while (n) {
    if (!c->wrem && c->whl >= 0) {
      c->wh[c->whl++] = (unsigned char)*p++;
      n--;
      int need = 2;
      if (c->whl >= 2) {
        if (c->wh[1] & 0x80) return -1; /* servers must not mask */
        int l7 = c->wh[1] & 127;
        need = l7 == 126 ? 4 : l7 == 127 ? 10 : 2;
      }
      if (c->whl < need) continue;
      int l7 = c->wh[1] & 127;
      uint64_t len = l7;
      if (l7 == 126) len = c->wh[2] << 8 | c->wh[3];
      else if (l7 == 127) { len = 0; for (int i = 0; i < 8; i++) len = len << 8 | c->wh[2 + i]; }
      c->wop = c->wh[0] & 15;
      c->wfin = c->wh[0] >> 7;
      if (c->wh[0] & 0x70) return -1; /* no extension was offered */
      c->wctl_len = 0;
      c->wrem = len;
      c->whl = -1;
      if (len) continue;
    } else {
      size_t l = n < c->wrem ? n : c->wrem;
      if (c->wop >= 8) {
        size_t k = l < sizeof c->wctl - (size_t)c->wctl_len ? l : sizeof c->wctl - (size_t)c->wctl_len;
        memcpy(c->wctl + c->wctl_len, p, k);
        c->wctl_len += k;
      } else { payload += l; c->payload += l; }
      p += l;
      n -= l;
      c->wrem -= l;
      if (c->wrem) continue;
    }
    /* frame complete */
    c->whl = 0;
    if (c->wop == 8) { ws_control(c, 8, c->wctl, c->wctl_len >= 2 ? 2 : 0); return 1; }
    if (c->wop == 9) ws_control(c, 10, c->wctl, c->wctl_len);
    else if (c->wop == 1 || c->wop == 2) { if (c->wfin) token(c, t); else c->wmsg = 1; }
    else if (c->wop == 0) { if (c->wfin) { token(c, t); c->wmsg = 0; } }
    else if (c->wop != 10) return -1;
  }
  return 0;
}

/* header end? parse; returns 1 ok, 0 more, -1 bad status */
static const char *hdr(const char *head, const char *name) { return strcasestr(head, name); }
static int parse_head(conn *c, const char *p, size_t n, size_t *used) {
  int before = c->headlen;
  size_t l = n < HEADMAX - 1 - (size_t)c->headlen ? n : HEADMAX - 1 - (size_t)c->headlen;
  memcpy(c->head + c->headlen, p, l);
  c->headlen += l;
  c->head[c->headlen] = 0;
  char *e = strstr(c->head, "\r\n\r\n");
  if (!e) return c->headlen >= HEADMAX - 1 ? -1 : 0;
  *used = (e + 4 - c->head) - before;
  e[2] = 0;
  if (o_mode == M_WS) {
    if (strncmp(c->head, "HTTP/1.1 101", 12)) return -1;
    if (!strstr(c->head, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")) return -1;
    if (hdr(c->head, "\nsec-websocket-extensions:")) return -1;
    return 1;
  }
  if (strncmp(c->head, "HTTP/1.1 200", 12)) return -1;
  const char *h;
  if ((h = hdr(c->head, "\ntransfer-encoding:")) && strncasecmp(h + 19 + strspn(h + 19, " "), "chunked", 7) == 0)
    c->bodykind = B_CHUNKED;
  else if ((h = hdr(c->head, "\ncontent-length:"))) c->bodykind = B_LENGTH, c->remain = atoll(h + 16);
  else c->bodykind = B_EOF;
  return 1;
}

static char rbuf[1 << 17];
static void on_read(conn *c) {
  for (;;) {
    ssize_t r = recv(c->fd, rbuf, sizeof rbuf, 0);
    if (r < 0) {
      if (errno == EAGAIN || errno == EINTR) return;
      if (c->state == S_WSCLOSING) { close_conn(c); return; }
      fail(c, E_RESET);
      return;
    }
    if (r == 0) {
      if (c->state == S_WSCLOSING) { close_conn(c); return; }
      if (c->state == S_BODY && o_mode != M_WS && c->bodykind == B_EOF) { done(c); return; }
      fail(c, E_EOF);
      return;
    }
    wire += r;
    uint64_t t = now();
    const char *p = rbuf;
    size_t n = r;
    if (c->state == S_HEAD) {
      size_t used = 0;
      int k = parse_head(c, p, n, &used);
      if (k < 0) { fail(c, E_STATUS); return; }
      if (!k) { if ((size_t)r < sizeof rbuf) return; continue; }
      p += used;
      n -= used;
      c->state = S_BODY;
      if (o_mode == M_WS) { /* upgraded: send the prompt as one masked text frame */
        push(&hs, &nhs, &chs, (uint32_t)((t - c->t_req) / 1000));
        c->out = g_wsframe;
        c->outlen = g_wsframelen;
        c->t_req = now();
        flush_out(c);
      }
    }
    int k = 0;
    if (c->state == S_BODY && n) {
      if (o_mode == M_WS) k = ws_feed(c, p, n, t);
      else if (c->bodykind == B_CHUNKED) k = chunk_feed(c, p, n, t);
      else {
        payload_feed(c, p, n, t);
        if (o_mode == M_CHUNKED) while (c->tokens < c->payload / o_size) token(c, t);
        if (c->bodykind == B_LENGTH && (c->remain -= n) <= 0) k = 1;
      }
    }
    if (k < 0) { fail(c, o_mode == M_WS ? E_WS : E_PARSE); return; }
    if (k > 0) { done(c); if (c->state == S_WSCLOSING) continue; return; }
    if ((size_t)r < sizeof rbuf) return;
  }
}

static int cmp(const void *a, const void *b) {
  uint32_t x = *(uint32_t *)a, y = *(uint32_t *)b;
  return x < y ? -1 : x > y;
}
static double pct(uint32_t *a, size_t n, double q) {
  if (!n) return -1;
  size_t i = (size_t)(q * (n - 1) + 0.5);
  return a[i] / 1000.0;
}
static double hpct(double q) {
  if (!ngap) return -1;
  uint64_t want = (uint64_t)(q * (ngap - 1)) + 1, s = 0;
  for (int i = 0; i < GAPMAX; i++)
    if ((s += gaph[i]) >= want) return i / 1000.0;
  return GAPMAX / 1000.0;
}
static double jpct(double q) { /* |gap-step| quantile, ms */
  int step = (int)(o_step * 1000 + .5);
  uint64_t want = (uint64_t)(q * (ngap - 1)) + 1, s = 0;
  if (!ngap) return -1;
  for (int d = 0; d < GAPMAX; d++) {
    if (step + d < GAPMAX) s += gaph[step + d];
    if (d && step - d >= 0) s += gaph[step - d];
    if (s >= want) return d / 1000.0;
  }
  return -1;
}

#define REQMAX 65535 /* what a frame with a 16-bit length holds */
static size_t read_file(const char *path, char *to, size_t max) {
  FILE *f = fopen(path, "rb");
  if (!f) die("cannot read %s", path);
  size_t n = fread(to, 1, max, f);
  fclose(f);
  return n;
}
static void build_request(void) {
  static char body[REQMAX];
  char prompt[256];
  memset(prompt, 'x', 200);
  prompt[200] = 0;
  int bl = snprintf(body, sizeof body,
                    "{\"model\":\"m\",\"stream\":true,\"max_tokens\":%d,\"size\":%d,\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}]}",
                    o_k, o_size, prompt);
  if (o_msgfile) bl = read_file(o_msgfile, body, REQMAX);
  g_req = malloc(REQMAX + 1024);
  if (o_reqfile) {
    g_reqlen = read_file(o_reqfile, g_req, REQMAX);
  } else if (o_mode == M_WS)
    g_reqlen = sprintf(g_req,
                       "GET %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                       "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
                       o_path, o_port);
  else
    g_reqlen = sprintf(g_req,
                       "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: sload/1\r\nAccept: %s\r\n"
                       "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
                       o_path, o_port, o_mode == M_SSE ? "text/event-stream" : "*/*", bl, body);
  g_wsframe = malloc(REQMAX + 8);
  size_t i = 0;
  g_wsframe[i++] = (char)0x81;
  if (bl < 126) g_wsframe[i++] = 0x80 | bl;
  else { g_wsframe[i++] = (char)(0x80 | 126); g_wsframe[i++] = bl >> 8; g_wsframe[i++] = bl & 255; }
  const char mk[4] = {0x37, (char)0xfa, 0x21, 0x3d};
  memcpy(g_wsframe + i, mk, 4);
  i += 4;
  for (int j = 0; j < bl; j++) g_wsframe[i++] = body[j] ^ mk[j & 3];
  g_wsframelen = i;
}

static void read_options(int argc, char **argv) {
  static struct option lo[] = {{"port", 1, 0, 'p'}, {"mode", 1, 0, 'm'}, {"path", 1, 0, 'u'}, {"request", 1, 0, 'f'},
                               {"message", 1, 0, 'g'}, {"n", 1, 0, 'n'}, {"k", 1, 0, 'k'}, {"size", 1, 0, 's'},
                               {"lead", 1, 0, 'a'}, {"trail", 1, 0, 'b'}, {"pid", 1, 0, 'P'}, {"step-ms", 1, 0, 'S'},
                               {"settle", 1, 0, 't'}, {"max-time", 1, 0, 'M'}, {0}};
  int o;
  while ((o = getopt_long(argc, argv, "", lo, 0)) != -1) switch (o) {
      case 'p': o_port = atoi(optarg); break;
      case 'm': o_mode = !strcmp(optarg, "sse") ? M_SSE : !strcmp(optarg, "ws") ? M_WS : !strcmp(optarg, "chunked") ? M_CHUNKED : -1; break;
      case 'u': o_path = optarg; break;
      case 'f': o_reqfile = optarg; break;
      case 'g': o_msgfile = optarg; break;
      case 'n': o_n = atoi(optarg); break;
      case 'k': o_k = atoi(optarg); break;
      case 's': o_size = atoi(optarg); break;
      case 'a': o_lead = atoi(optarg); break;
      case 'b': o_trail = atoi(optarg); break;
      case 'P': o_pid = atoi(optarg); break;
      case 'S': o_step = atof(optarg); break;
      case 't': o_settle = atof(optarg); break;
      case 'M': o_max = atof(optarg); break;
      default: die("usage: sload --mode sse|chunked|ws --port P [--n N --k K --size B --path U --request FILE --message FILE "
                   "--lead N --trail N --pid PID --step-ms MS --settle S --max-time S]");
    }
  if (o_mode < 0 || !o_port) die("--mode and --port are needed");
  if (!o_path) o_path = o_mode == M_SSE ? "/sse" : o_mode == M_WS ? "/ws" : "/chunked";
}

/* Finish connecting: the stream begins now, or with all others. */
static void connected(conn *c, int released, int *ready) {
  int e = 0;
  socklen_t l = sizeof e;
  getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &e, &l);
  if (e) die("cannot connect: %s", strerror(e));
  c->state = S_READY;
  if (released) start_request(c);
  else { ++*ready; ev(c, 0, EPOLL_CTL_MOD); }
}

/* Whether a WebSocket still waits for its server to close TCP. One that never does is given up and counted. */
static int lingering(uint64_t t) {
  int busy = 0;
  for (int i = 0; i < o_n; i++) {
    if (C[i].state == S_WSCLOSING && (int64_t)(t - C[i].t_close) > 2000000000ll) lateclose++, close_conn(&C[i]);
    if (C[i].state != S_IDLE) busy = 1;
  }
  return busy;
}

/* From the connections to the end of the last stream. */
static void run(void) {
  struct epoll_event *evs = malloc(sizeof *evs * 1024);
  uint64_t t_max = t_start + (uint64_t)(o_max * 1e9), settle_until = 0;
  int ready = 0, released = 0;
  for (int i = 0; i < o_n; i++) open_conn(&C[i]);
  for (;;) {
    int n = epoll_wait(ep, evs, 1024, 0);
    uint64_t t = now();
    for (int i = 0; i < n; i++) {
      conn *c = evs[i].data.ptr;
      if (c->fd < 0) continue;
      if (c->state == S_CONNECTING) { connected(c, released, &ready); continue; }
      if ((evs[i].events & EPOLLOUT) && c->outlen) flush_out(c);
      if (evs[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) on_read(c);
    }
    if (w_state == 0 && firsts >= o_n) {
      w_cpu0 = quick_cpu();
      w_tok0 = tokens;
      w_t0 = now();
      w_state = 1;
    }
    if (!released && ready == o_n && !settle_until) settle_until = t + (uint64_t)(o_settle * 1e9);
    if (!released && settle_until && t >= settle_until) {
      released = 1;
      for (int i = 0; i < o_n; i++) start_request(&C[i]);
    }
    if (t >= t_max) { err[E_TIMEOUT] += active + !released; errors += active + !released; break; }
    if (released && active == 0 && !lingering(t)) break;
  }
  window_close();
}

int main(int argc, char **argv) {
  read_options(argc, argv);
  addr.sin_family = AF_INET;
  addr.sin_port = htons(o_port);
  addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  signal(SIGPIPE, SIG_IGN);
  struct rlimit rl;
  getrlimit(RLIMIT_NOFILE, &rl);
  rl.rlim_cur = rl.rlim_max;
  setrlimit(RLIMIT_NOFILE, &rl);
  if ((rlim_t)o_n + 16 > rl.rlim_cur) die("ulimit -n %lu is too low for %d connections", (unsigned long)rl.rlim_cur, o_n);
  build_request();
  gaph = calloc(GAPMAX, sizeof *gaph);
  C = calloc(o_n, sizeof *C);
  ep = epoll_create1(0);
  usage u0 = sample(o_pid), u1;
  t_start = now();
  run();
  u1 = sample(o_pid);
  double cpu = u1.cpu - u0.cpu, wall = (t_lasttok > t_firstreq ? t_lasttok - t_firstreq : 0) / 1e9;
  qsort(ttft, nttft, 4, cmp);
  qsort(hs, nhs, 4, cmp);
  printf("{\"n\":%d,\"k\":%d,\"streams\":%lu,\"errors\":%lu,\"error_kinds\":{", o_n, o_k, finished, errors);
  for (int i = 0, f = 0; i < E_N; i++)
    if (err[i]) printf("%s\"%s\":%lu", f++ ? "," : "", ename[i], err[i]);
  printf("},\"tokens\":%lu,\"chunks\":%lu,\"payload_bytes\":%lu,\"wire_bytes\":%lu", tokens, chunks, payload, wire);
  printf(",\"wall_s\":%.4f,\"tok_s\":%.1f,\"late_close\":%lu", wall, wall > 0 ? tokens / wall : 0, lateclose);
  printf(",\"ttft_ms\":{\"p50\":%.3f,\"p99\":%.3f,\"max\":%.3f}", pct(ttft, nttft, .5), pct(ttft, nttft, .99), pct(ttft, nttft, 1));
  if (o_mode == M_WS) printf(",\"handshake_ms\":{\"p50\":%.3f,\"p99\":%.3f}", pct(hs, nhs, .5), pct(hs, nhs, .99));
  printf(",\"gap_ms\":{\"p50\":%.3f,\"p90\":%.3f,\"p99\":%.3f,\"p999\":%.3f,\"max\":%.3f,\"mean\":%.4f}", hpct(.5), hpct(.9), hpct(.99),
         hpct(.999), maxgap / 1000.0, ngap ? gapsum / 1000.0 / ngap : -1);
  if (o_step >= 0)
    printf(",\"jitter_ms\":{\"p50\":%.3f,\"p99\":%.3f,\"late_p99\":%.3f}", jpct(.5), jpct(.99), hpct(.99) - o_step);
  printf(",\"server\":{\"cpu_s\":%.5f,\"cpu_us_per_token\":%.3f,\"procs\":%d,\"rss0_kb\":%ld,\"rss1_kb\":%ld}", cpu,
         tokens ? cpu * 1e6 / tokens : -1, u1.nproc, u0.rss_kb, u1.rss_kb);
  if (w_state == 2 && w_tok1 > w_tok0)
    printf(",\"steady\":{\"tokens\":%lu,\"s\":%.4f,\"cpu_us_per_token\":%.3f}", w_tok1 - w_tok0, (w_t1 - w_t0) / 1e9,
           (w_cpu1 - w_cpu0) * 1e6 / (w_tok1 - w_tok0));
  printf("}\n");
  return errors ? 1 : 0;
}
