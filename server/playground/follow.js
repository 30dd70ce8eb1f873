// One streamed answer, read to its end whatever happens to the connection: after a cut it goes on behind the last
// position that came, by Last-Event-ID, as the browser's own EventSource does. (EventSource itself can't POST.)

import { ask, pause, Refused } from "./api.js";
import { EventParser, positionOf } from "./sse.js";

const RETURN_MS = [1000, 1000, 2000, 3000, 5000, 5000, 5000];
const SHOWN_CUT_MS = 2000; // a cut that somebody asked for stays so long, to be seen
const WORTH_ANOTHER_TRY = [429, 503];

export class Follower {
  #told;
  #signal;
  #connection = null;
  #cutOnPurpose = false;
  stream = "";
  position = -1; // of the last event that came
  lost = 0; // positions that never came
  doubled = 0; // positions that came twice
  cuts = 0;

  /** `told` has the functions event(data), cut(position) and resumed(position); `signal` ends the reading. */
  constructor(told, signal) {
    this.#told = told;
    this.#signal = signal;
    signal.addEventListener("abort", () => this.#connection?.abort(), { once: true });
  }

  /** Break the connection off, as a tunnel or a sleeping laptop does. */
  cut() {
    this.#cutOnPurpose = true;
    this.#connection?.abort();
  }

  /** Begin by `path` and `options`, and read to the end. Rejects with Refused, or when the server stays away. */
  async read(path, options) {
    // The same request, sent again before its answer named the stream, finds the generation that it began.
    const headers = { ...options.headers, "Idempotency-Key": newName() };
    let failures = 0;
    for (;;) {
      const before = this.position;
      try {
        if (await this.#readOnce(path, { ...options, headers })) return;
      } catch (error) {
        const mayHelp = !(error instanceof Refused) || (this.stream && WORTH_ANOTHER_TRY.includes(error.status));
        if (!mayHelp) throw error;
      }
      if (this.#signal.aborted) throw this.#signal.reason;
      if (this.position > before) failures = 0;
      if (failures === RETURN_MS.length) throw new Error("The server can't be reached.");
      if (failures === 0) this.#told.cut(this.position, ++this.cuts);
      await pause(this.#cutOnPurpose ? SHOWN_CUT_MS : RETURN_MS[failures++], this.#signal);
      this.#cutOnPurpose = false;
    }
  }

  /** Whether the end came. */
  async #readOnce(path, options) {
    this.#connection = new AbortController();
    const { signal } = this.#connection;
    let comesBack = this.stream !== "";
    const answer = comesBack
      ? await ask(`v1/streams/${this.stream}`, { headers: this.#place(), signal })
      : await ask(path, { ...options, signal });
    if (answer.status === 204) return true;
    this.stream = answer.headers.get("X-Stream-Id");
    const parser = new EventParser();
    const reader = answer.body.getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return false;
      for (const { data, id } of parser.feed(value)) {
        if (!this.#isNew(positionOf(id))) continue;
        if (comesBack) this.#told.resumed(this.position);
        comesBack = false;
        if (data === "[DONE]") return true;
        this.#told.event(JSON.parse(data));
      }
    }
  }

  #place() {
    const headers = { Accept: "text/event-stream" };
    if (this.position >= 0) headers["Last-Event-ID"] = `${this.stream}:${this.position}`;
    return headers;
  }

  /** Keep the books: each event's position is the one behind the last. */
  #isNew(position) {
    if (position <= this.position) {
      this.doubled++;
      return false;
    }
    this.lost += position - this.position - 1;
    this.position = position;
    return true;
  }
}

function newName() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
