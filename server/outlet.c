/* Outlet: a token's event from its pieces straight into the socket, as one send(2). See outlet.py for what it is for.
 *
 * The bytes around the text lie in one block of memory behind the struct. A server with hundreds of streams finds
 * nothing of a stream in the processor's caches when its next token comes: what a token costs is mostly how many
 * different places it touches.
 *
 * Everything is bounded: an event that does not fit in ROOM is not made here, and `send` says so before a byte is sent.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <structmember.h>

#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define VERSION 2 /* as in outlet.py, as are these */
enum { TEXT, POSITION, PLAIN_TEXT, MARKS }; /* a piece that is no mark is bytes */
enum { BARE, CHUNK, FRAME, ENVELOPES };
#define PIECES_MAX 8
#define ROOM 4096      /* of one event with its envelope: a token's is a few hundred bytes */
#define ENVELOPE_MAX 8 /* in front: a size of up to four hexadecimal digits and CR LF; or a frame's header */
#define DIGITS_MAX 20
#define LINE 64        /* bytes of the processor's caches: what is asked for at a time */
#define TOUCHED_MAX 20 /* lines of other objects */
#define BLOCK_MAX 32   /* outlets of one call of prefetch */
#define FRAME_SHORT 126 /* RFC 6455 5.2: a longer payload has its length in two more bytes */

typedef struct {
  PyObject_VAR_HEAD
  PyObject *write; /* the transport's */
  double sent_at;
  int fd, envelope, pieces, lines;
  const char *touched[TOUCHED_MAX]; /* where they begin; only ever asked for, so the objects may be gone */
  int lengths[PIECES_MAX]; /* of the bytes; or a mark, as -1 - mark */
  char bytes[];
} Outlet;
static PyTypeObject *outlet_type;

static char *put_digits(char *to, size_t number) {
  char digits[DIGITS_MAX], *at = digits + DIGITS_MAX;
  do *--at = (char)('0' + number % 10);
  while (number /= 10);
  size_t length = (size_t)(digits + DIGITS_MAX - at);
  memcpy(to, at, length);
  return to + length;
}

/* The event, from `to` on, of which there is room for ROOM - ENVELOPE_MAX - 2 bytes. Its end; NULL if it is none for
 * here. */
static char *render(const Outlet *self, char *to, const char *text, size_t size, size_t position) {
  const char *from = self->bytes, *last = to + ROOM - ENVELOPE_MAX - 2;
  for (int i = 0; i < self->pieces; i++) {
    int length = self->lengths[i];
    if (length >= 0) {
      if (length > last - to) return NULL;
      memcpy(to, from, (size_t)length);
      to += length;
      from += length;
    } else if (length == -1 - POSITION) {
      if (DIGITS_MAX > last - to) return NULL;
      to = put_digits(to, position);
    } else {
      if (size > (size_t)(last - to)) return NULL;
      if (length == -1 - PLAIN_TEXT && memchr(text, '\\', size)) return NULL; /* its escapes must be undone */
      memcpy(to, text, size);
      to += size;
    }
  }
  return to;
}

/* Put the envelope around the event from `from` to `*end`. Where it begins now. */
static char *wrap(int envelope, char *from, char **end) {
  size_t size = (size_t)(*end - from);
  if (envelope == CHUNK) {
    *--from = '\n';
    *--from = '\r';
    do *--from = "0123456789abcdef"[size & 15];
    while (size >>= 4);
    *(*end)++ = '\r';
    *(*end)++ = '\n';
  } else if (envelope == FRAME) {
    if (size < FRAME_SHORT) {
      *--from = (char)size;
    } else {
      *--from = (char)(size & 255);
      *--from = (char)(size >> 8);
      *--from = (char)FRAME_SHORT;
    }
    *--from = (char)0x81; /* a whole text message */
  }
  return from;
}

/* What the socket doesn't take the transport does, and it is the transport that finds out what is wrong. */
static int leave_to_transport(Outlet *self, const char *from, Py_ssize_t size) {
  PyObject *rest = PyBytes_FromStringAndSize(from, size);
  if (rest == NULL) return -1;
  PyObject *done = PyObject_CallFunctionObjArgs(self->write, rest, NULL);
  Py_DECREF(rest);
  Py_XDECREF(done);
  return done == NULL ? -1 : 0;
}

static PyObject *outlet_send(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
  Outlet *self = (Outlet *)object;
  char *text, room[ROOM];
  Py_ssize_t size;
  if (count != 2) return PyErr_Format(PyExc_TypeError, "send takes a text and a position"), NULL;
  if (PyBytes_AsStringAndSize(arguments[0], &text, &size) < 0) return NULL;
  size_t position = PyLong_AsSize_t(arguments[1]);
  if (position == (size_t)-1 && PyErr_Occurred()) return NULL;
  if (size == 0 || position == 0 || self->write == NULL) Py_RETURN_FALSE;
  char *end = render(self, room + ENVELOPE_MAX, text, (size_t)size, position);
  if (end == NULL) Py_RETURN_FALSE;
  char *from = wrap(self->envelope, room + ENVELOPE_MAX, &end);
  ssize_t sent = send(self->fd, from, (size_t)(end - from), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) sent = 0;
  if (sent < end - from && leave_to_transport(self, from + sent, end - from - sent) < 0) return NULL;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  self->sent_at = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
  Py_RETURN_TRUE;
}

/* The lines of an object that it may touch: all of those that its type always has. */
static PyObject *outlet_touches(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
  Outlet *self = (Outlet *)object;
  self->lines = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *known = PyObject_GetAttrString((PyObject *)Py_TYPE(arguments[i]), "__basicsize__");
    if (known == NULL) return NULL;
    Py_ssize_t size = PyLong_AsSsize_t(known);
    Py_DECREF(known);
    if (size == -1 && PyErr_Occurred()) return NULL;
    for (Py_ssize_t at = 0; at < size + LINE - 1 && self->lines < TOUCHED_MAX; at += LINE)
      self->touched[self->lines++] = (const char *)arguments[i] + (at < size ? at : size - 1);
  }
  Py_RETURN_NONE;
}

/* Memory answers many questions in the time of one. So for a few sequences together the outlets are asked for first,
 * and then, when those are here, whatever they say that a token touches. */
static PyObject *prefetch(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  const Outlet *found[BLOCK_MAX];
  int known = 0;
  (void)module;
  if (count != 2 || !PyDict_Check(arguments[0]) || !PyList_Check(arguments[1]))
    return PyErr_Format(PyExc_TypeError, "prefetch takes a dict and a list"), NULL;
  for (Py_ssize_t i = 0, size = PyList_Size(arguments[1]); i < size && known < BLOCK_MAX; i++) {
    PyObject *outlet = PyDict_GetItemWithError(arguments[0], PyList_GetItem(arguments[1], i));
    if (outlet == NULL) {
      if (PyErr_Occurred()) return NULL;
      continue;
    }
    for (size_t at = 0; at < offsetof(Outlet, bytes); at += LINE) __builtin_prefetch((const char *)outlet + at, 1);
    found[known++] = (const Outlet *)outlet;
  }
  for (int i = 0; i < known; i++) {
    const Outlet *outlet = found[i];
    if (!Py_IS_TYPE((PyObject *)outlet, outlet_type)) continue;
    for (Py_ssize_t at = 0; at < Py_SIZE((PyObject *)outlet); at += LINE) __builtin_prefetch(outlet->bytes + at);
    for (int line = 0; line < outlet->lines; line++) __builtin_prefetch(outlet->touched[line], 1);
  }
  Py_RETURN_NONE;
}

/* Learn the pieces; with `to` also copy their bytes there. The number of bytes; -1 with an exception. */
static Py_ssize_t learn(PyObject *pieces, Py_ssize_t count, int *lengths, char *to) {
  Py_ssize_t total = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *piece = PyTuple_GetItem(pieces, i);
    if (PyLong_Check(piece)) {
      long mark = PyLong_AsLong(piece);
      if (mark == -1 && PyErr_Occurred()) return -1;
      if (mark < 0 || mark >= MARKS) return PyErr_Format(PyExc_ValueError, "%ld is no mark", mark), -1;
      lengths[i] = (int)(-1 - mark);
    } else {
      char *bytes;
      Py_ssize_t length;
      if (PyBytes_AsStringAndSize(piece, &bytes, &length) < 0) return -1;
      if (length > ROOM) return PyErr_Format(PyExc_ValueError, "a piece has at most %d bytes", ROOM), -1;
      if (to != NULL) memcpy(to + total, bytes, (size_t)length);
      lengths[i] = (int)length;
      total += length;
    }
  }
  return total;
}

static PyObject *outlet_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"fd", "envelope", "pieces", "write", NULL};
  int fd, envelope, lengths[PIECES_MAX];
  PyObject *pieces, *write;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "iiO!O", names, &fd, &envelope, &PyTuple_Type, &pieces, &write))
    return NULL;
  Py_ssize_t count = PyTuple_Size(pieces);
  if (count > PIECES_MAX) return PyErr_Format(PyExc_ValueError, "at most %d pieces", PIECES_MAX), NULL;
  if (envelope < 0 || envelope >= ENVELOPES) return PyErr_Format(PyExc_ValueError, "%d is no envelope", envelope), NULL;
  Py_ssize_t total = learn(pieces, count, lengths, NULL);
  if (total < 0) return NULL;
  Outlet *self = (Outlet *)PyType_GenericAlloc(type, total);
  if (self == NULL) return NULL;
  learn(pieces, count, self->lengths, self->bytes);
  self->fd = fd;
  self->envelope = envelope;
  self->pieces = (int)count;
  Py_INCREF(write);
  self->write = write;
  return (PyObject *)self;
}

static int outlet_traverse(PyObject *object, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((Outlet *)object)->write);
  return 0;
}

static int outlet_clear(PyObject *object) {
  Py_CLEAR(((Outlet *)object)->write);
  return 0;
}

static void outlet_dealloc(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  outlet_clear(object);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"send", (PyCFunction)(void (*)(void))outlet_send, METH_FASTCALL,
     "send(text, position) -> whether it is on its way; if not, nothing was sent, and it must go another way."},
    {"touches", (PyCFunction)(void (*)(void))outlet_touches, METH_FASTCALL,
     "touches(*objects): what a token that it sends touches beside it, for prefetch. No reference is kept."},
    {0},
};
static PyMethodDef functions[] = {
    {"prefetch", (PyCFunction)(void (*)(void))prefetch, METH_FASTCALL,
     "prefetch(outlets, ids): have the memory that a token of each id touches brought into the processor's caches."},
    {0},
};
static PyMemberDef members[] = {
    {"sent_at", T_DOUBLE, offsetof(Outlet, sent_at), READONLY, "when it last sent, by CLOCK_MONOTONIC; 0: never"},
    {0},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "Outlet(fd, envelope, pieces, write)"},
    {Py_tp_new, outlet_new},
    {Py_tp_traverse, outlet_traverse},
    {Py_tp_clear, outlet_clear},
    {Py_tp_dealloc, outlet_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};
static PyType_Spec spec = {
    .name = "server._outlet.Outlet",
    .basicsize = offsetof(Outlet, bytes),
    .itemsize = 1,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_outlet", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__outlet(void) {
  PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&spec);
  if (made == NULL || type == NULL || PyModule_AddIntConstant(made, "VERSION", VERSION) < 0 ||
      PyModule_AddObject(made, "Outlet", type) < 0) {
    Py_XDECREF(made);
    Py_XDECREF(type);
    return NULL;
  }
  outlet_type = (PyTypeObject *)type;
  return made;
}
