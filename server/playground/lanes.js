// Four ways to read the same answer. Each is a function (query, told, signal): it begins a stream by GET /v1/generate,
// or the same on a WebSocket, tells of what comes by told.requests(), told.bytes(n) and told.tokens(texts), by
// told.waits(sentence) why nothing comes, and resolves at the end. It sets `told.stream` once it knows the id, so that the stream can be cancelled; one whose id
// isn't known yet when `signal` ends it is cancelled by the lane itself. `told.token` is the field for addresses, where
// a key is used.

import {
  answered, ask, askJson, begin, cancel, LEASE_S, patiently, pause, Refused, RETURN_MS, socketAddress, streamOf, tokenField, Unanswered,
} from "./api.js";
import { positionOf } from "./sse.js";

const POLL_EVERY_MS = 250;
const RETRY_BYTES = "retry: 1000\n".length; // in front of the first event

const utf8 = new TextEncoder();
const sizeOf = (text) => utf8.encode(text).length;

/** The texts of chat chunks; an error in the stream is thrown. */
function textsOf(chunks) {
  return chunks.flatMap((chunk) => {
    if (chunk.error) throw new Error(chunk.error.message);
    return chunk.choices?.[0]?.delta.content || [];
  });
}

async function polling(query, told, signal) {
  told.requests();
  const json = { headers: { Accept: "application/json" }, signal, late: told.waits };
  const stream = streamOf(await begin(`v1/generate?${query}`, { headers: json.headers }, signal));
  told.stream = stream;
  const poll = async (after) => {
    told.requests();
    const answer = await ask(`v1/streams/${stream}?after=${after}`, json);
    return answered(answer.text(), signal);
  };
  for (let after = -1; ; ) {
    const body = await patiently(() => poll(after), signal, told.waits);
    told.bytes(sizeOf(body));
    const { events, next, outcome } = JSON.parse(body);
    told.tokens(textsOf(events.map(({ data }) => data)));
    after = next - 1;
    if (outcome) return;
    await pause(POLL_EVERY_MS, signal);
  }
}

async function chunked(query, told, signal) {
  told.requests();
  const answer = await begin(`v1/generate?${query}`, { headers: { Accept: "application/x-ndjson" } }, signal);
  told.stream = streamOf(answer);
  const decoder = new TextDecoder();
  const reader = answer.body.getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await answered(reader.read(), signal);
    if (done) throw new Error("The answer was cut.");
    told.bytes(value.length);
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    const chunks = lines.filter(Boolean).map((line) => JSON.parse(line));
    told.tokens(textsOf(chunks));
    if (chunks.at(-1)?.done) return;
  }
}

/** By itself the browser comes back to where it was, but not once the server refuses it, as when the token in its address
 *  is a minute old. Then the page asks for the reason, and where there is none any more comes back with a new token. */
function sse(query, told, signal) {
  return new Promise((resolve, reject) => {
    let source, position = -1, lostAt = null;
    const end = (settle, value) => {
      source.close();
      settle(value);
    };
    const take = ({ data, lastEventId }) => {
      told.stream ??= lastEventId.slice(0, lastEventId.lastIndexOf(":"));
      if (signal.aborted) return end(cancel, told.stream);
      position = positionOf(lastEventId);
      lostAt = null;
      told.bytes(sizeOf(`data: ${data}\nid: ${lastEventId}\n\n`) + (position === 0 ? RETRY_BYTES : 0));
      if (data === "[DONE]") return end(resolve);
      try {
        told.tokens(textsOf([JSON.parse(data)]));
      } catch (error) {
        end(reject, error);
      }
    };
    const lose = () => {
      lostAt ??= performance.now();
      if (signal.aborted) source.close();
      else if (performance.now() - lostAt > LEASE_S * 1000) end(reject, new Unanswered("The server can't be reached."));
      else if (source.readyState !== EventSource.CLOSED) {
        told.requests();
        told.waits("The connection broke; the browser tries again.");
      } else if (told.stream) comeBack().catch(reject);
      else whyRefused(query, signal).then(reject);
    };
    const read = (address) => {
      told.requests();
      source = new EventSource(address);
      Object.assign(source, { onmessage: take, onerror: lose });
    };
    const comeBack = async () => {
      await pause(RETURN_MS[0], signal);
      read(await patiently(() => wayBack(told, position, signal), signal, told.waits));
    };
    signal.addEventListener("abort", () => {
      reject(signal.reason);
      if (told.stream) source.close(); // else the first event names what is to be cancelled
    }, { once: true });
    read(`v1/generate?${told.token}${query}`);
  });
}

/** The address of what comes behind `position`, with a new token. Rejects where the server would refuse it. */
async function wayBack({ stream, requests }, position, signal) {
  requests();
  await askJson(`v1/streams/${stream}?after=${position}`, { headers: { Accept: "application/json" }, signal });
  return `v1/streams/${stream}?${await tokenField()}after=${position}`;
}

function webSocket(query, told, signal) {
  told.requests();
  const { prompt, max_tokens, temperature } = Object.fromEntries(new URLSearchParams(query));
  const message = {
    type: "generate",
    id: "race",
    messages: [{ role: "user", content: prompt }],
    max_tokens: Number(max_tokens),
    temperature: Number(temperature),
  };
  return new Promise((resolve, reject) => {
    const socket = new WebSocket(socketAddress(`v1/ws?${told.token}`));
    let opened = false;
    const end = (settle, value) => {
      settle(value);
      socket.close();
    };
    signal.addEventListener("abort", () => {
      reject(signal.reason);
      if (!opened) return; // closed now, it would be logged as a fault
      socket.send(JSON.stringify({ type: "cancel", id: message.id }));
      socket.close();
    }, { once: true });
    socket.onopen = () => {
      if (signal.aborted) return socket.close();
      opened = true;
      socket.send(JSON.stringify(message));
    };
    socket.onmessage = ({ data }) => {
      told.bytes(sizeOf(data));
      const { type, text, stream, error, retry_after } = JSON.parse(data);
      if (type === "started") told.stream = stream;
      else if (type === "token") told.tokens([text]);
      else if (type === "done") end(resolve);
      else end(reject, new Refused(0, error.message, retry_after));
    };
    socket.onclose = () => {
      if (opened) reject(new Error("The socket was closed."));
      else if (!signal.aborted) whyRefused(query, signal).then(reject);
    };
  });
}

/** A browser doesn't tell a page why it got no EventSource or WebSocket: the same asked by fetch is told. */
async function whyRefused(query, signal) {
  try {
    const answer = await begin(`v1/generate?${query}`, { headers: { Accept: "text/event-stream" } }, signal);
    await cancel(streamOf(answer));
    await answer.body.cancel();
    return new Error("The browser got no stream, and isn't told why.");
  } catch (error) {
    return error;
  }
}

export const LANES = [
  { name: "Polling", note: `asks every ${POLL_EVERY_MS} ms`, run: polling },
  { name: "Chunked", note: "NDJSON in chunks", run: chunked },
  { name: "SSE", note: "EventSource", run: sse },
  { name: "WebSocket", note: "a message a token", run: webSocket },
];
