// Node's http (SSE, chunked) and, where it is installed, ws. Argument: the port. Environment: STEP in milliseconds.
'use strict';
const http = require('http');
const { once } = require('events');

const STEP_MS = parseFloat(process.env.STEP || '0');
const CREATED = Math.floor(Date.now() / 1000);
const BEFORE = `data: {"id":"cmpl-1","object":"chat.completion.chunk","created":${CREATED},"model":"m","choices":[{"index":0,"delta":{"content":"`;
const BEHIND = '"},"finish_reason":null}]}\n\n';
const SSE_FIELDS = { 'Content-Type': 'text/event-stream', 'Cache-Control': 'no-cache' };
const TEXT_FIELDS = { 'Content-Type': 'text/plain; charset=utf-8' };

// Unbounded, for one consumer, as asyncio.Queue in tokens.py.
class Queue {
  constructor() { this.items = []; this.head = 0; this.waiter = null; }

  put(item) {
    if (!this.waiter) { this.items.push(item); return; }
    const waiter = this.waiter;
    this.waiter = null;
    waiter(item);
  }

  get() {
    if (this.head === this.items.length) return new Promise((resolve) => { this.waiter = resolve; });
    const item = this.items[this.head++];
    if (this.head === this.items.length) { this.items.length = 0; this.head = 0; }
    return Promise.resolve(item);
  }
}

let streams = [];
let running = false;
let due = 0;

function open(count, size) {
  const token = size === 5 ? ' tokn' : ' ' + 'k'.repeat(size - 1);
  const stream = { queue: new Queue(), left: count, token, dead: false };
  streams.push(stream);
  if (!running) { running = true; due = performance.now(); setImmediate(step); }
  return stream;
}

function step() {
  for (const stream of streams) {
    if (stream.dead) continue;
    stream.left--;
    stream.queue.put(stream.token);
  }
  streams = streams.filter((stream) => stream.left > 0 && !stream.dead);
  if (streams.length === 0) { running = false; return; }
  due += STEP_MS;
  const wait = due - performance.now();
  if (wait > 0) { setTimeout(step, wait); return; }
  due = performance.now();
  setImmediate(step);
}

async function answer(request, response, body) {
  const { max_tokens: count, size = 5 } = JSON.parse(body);
  const sse = request.url === '/sse';
  response.writeHead(200, sse ? SSE_FIELDS : TEXT_FIELDS);
  const stream = open(count, size);
  response.on('close', () => { stream.dead = true; });
  for (let i = 0; i < count; i++) {
    const token = await stream.queue.get();
    if (!response.write(sse ? BEFORE + token + BEHIND : token)) await once(response, 'drain');
  }
  if (sse) response.write('data: [DONE]\n\n');
  response.end();
}

const server = http.createServer((request, response) => {
  let body = '';
  request.setEncoding('utf8');
  request.on('data', (data) => { body += data; });
  request.on('end', () => answer(request, response, body).catch(() => response.destroy()));
});

function serveWebSockets({ WebSocketServer }) {
  new WebSocketServer({ server, path: '/ws', perMessageDeflate: false }).on('connection', (socket) => {
    socket.on('error', () => {});
    socket.once('message', async (message) => {
      const { max_tokens: count, size = 5 } = JSON.parse(message.toString());
      const stream = open(count, size);
      socket.on('close', () => { stream.dead = true; });
      for (let i = 0; i < count; i++) socket.send(await stream.queue.get());
      socket.close(1000);
    });
  });
}

try {
  serveWebSockets(require('ws'));
} catch (error) {
  if (error.code !== 'MODULE_NOT_FOUND') throw error;
}
server.listen({ port: parseInt(process.argv[2], 10), host: '127.0.0.1', backlog: 4096 });
