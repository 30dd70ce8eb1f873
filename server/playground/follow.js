// One streamed answer, read to its end whatever happens to the connection: after a cut it goes on behind the last
// position that came, by Last-Event-ID, as the browser's own EventSource does. (EventSource itself can't POST.)

import { answered, ask, begin, pause, streamOf, Unanswered, waitOut } from "./api.js";
import { EventParser, positionOf } from "./sse.js";

export const SHOWN_CUT_MS = 2000; // a cut that somebody asked for stays so long, to be seen

export class Follower {
  #told;
  #signal;
  #connection = null;
  #cutOnPurpose = false;
  #reading = false; // an answer has begun on this connection
  stream = "";
  position = -1; // of the last event that came
  lost = 0; // positions that never came
  doubled = 0; // positions that came twice
  cuts = 0; // of answers that had begun

  /** `told` has the functions event(data), begun() when an answer begins, late(sentence) when none does, and
   *  resumed(position); and away(onPurpose, said) when nobody reads for a while: it was cut by this page or otherwise, or
   *  `said` is why no answer began. `signal` ends it. */
  constructor(told, signal) {
    this.#told = told;
    this.#signal = signal;
  }

  /** Break the connection off, as a tunnel or a sleeping laptop does. */
  cut() {
    this.#cutOnPurpose = true;
    this.#connection?.abort();
  }

  /** Begin by `path` and `options`, and read to the end. Rejects with Refused, with Unanswered when the server stays
   *  away, and when the signal ends it. */
  async read(path, options) {
    // The same request, sent again before its answer named the stream, finds the generation that it began.
    const headers = { ...options.headers, "Idempotency-Key": newName() };
    for (let failures = 0; ; ) {
      const before = this.position;
      let failure = new Unanswered("The connection broke.");
      this.#reading = false;
      try {
        if (await this.#readOnce(path, { ...options, headers })) return;
      } catch (error) {
        if (this.#signal.aborted) throw this.#signal.reason;
        failure = error;
      }
      if (this.position > before) failures = 0;
      if (this.#reading) this.cuts++;
      if (this.#cutOnPurpose) await this.#stayAway();
      else if (!this.stream && !(failure instanceof Unanswered)) throw failure;
      else await waitOut(failure, failures++, this.#signal, (said) => this.#told.away(false, this.#reading ? "" : said));
    }
  }

  async #stayAway() {
    this.#told.away(true, "");
    await pause(SHOWN_CUT_MS, this.#signal);
    this.#cutOnPurpose = false;
  }

  /** Whether the end came. */
  async #readOnce(path, options) {
    this.#connection = new AbortController();
    const { signal } = this.#connection;
    const either = AbortSignal.any([signal, this.#signal]);
    let comesBack = this.stream !== "";
    const answer = comesBack
      ? await ask(`v1/streams/${this.stream}`, { headers: this.#place(), signal: either, late: this.#told.late })
      : await begin(path, { ...options, signal, late: this.#told.late }, this.#signal);
    if (answer.status === 204) return true;
    this.stream = streamOf(answer);
    this.#reading = true;
    this.#told.begun();
    const parser = new EventParser();
    const reader = answer.body.getReader();
    for (;;) {
      const { done, value } = await answered(reader.read(), either);
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
