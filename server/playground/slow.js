// A reader as slow as the slider says. It asks for more only when it has read what it has, or else the server would take
// it for gone: between two polls the engine may run one credit window ahead, and then parks the stream.

import { announce } from "./announce.js";
import { askJson, begin, cancel, LEASE_S, lossOf, onNextKey, patiently, pause, Refused, streamOf, UNCONFIRMED } from "./api.js";
import { onPress, setUsable } from "./controls.js";
import { lookAgain, onStatus } from "./engine.js";
import { plural } from "./figures.js";
import { paintStates } from "./paint.js";

const PROMPT = "Count from one upwards, in words, and do not stop.";
const MAX_TOKENS = 1500;
const LOOK_MS = 250; // how soon a moved slider is felt
const WAIT_S = 10; // of a poll, when all is read
const STRIP_MS = 30_000;
const STOOD_MS = 2000; // a state that stood so long is news: a stream may run and be parked by turns each second
const ID_CHARS = 8; // of a stream's id in /status
const ENDED_WELL = ["stop", "length", "tool_calls"];
// The server takes a reader that asks for nothing for so long (--resume-ttl) for gone: half of that is soon enough.
const POLL_MS = LEASE_S * 500;

// What the page itself knows of a stream, beside the states and outcomes that the server tells.
const WORDS = { unknown: "not known", none: "not begun" };

const at = (id) => document.getElementById(id);
const rate = at("slow-rate"), start = at("slow-start"), stop = at("slow-stop");

let reading = null;

export function startSlowReader() {
  rate.addEventListener("input", showRate);
  showRate();
  setReading(false);
  onPress(start, () => {
    reading = new SlowReader();
    reading.run();
  });
  onPress(stop, () => reading.stop());
}

const perSecond = () => (rate.value === rate.max ? Infinity : rate.valueAsNumber);

function showRate() {
  const few = perSecond() ? `${plural(perSecond(), "piece")} a second` : "nothing";
  const words = perSecond() === Infinity ? "all there is" : few;
  at("slow-value").textContent = words;
  rate.setAttribute("aria-valuetext", words);
}

function setReading(goesOn) {
  setUsable(start, !goesOn);
  setUsable(stop, goesOn);
}

class SlowReader {
  #ending = new AbortController();
  #began = performance.now();
  #stream = "";
  #outcome = ""; // once it is known
  #state = "";
  #told = ""; // the state that a screen reader heard last
  #telling = 0;
  #changes = []; // [ms, state]
  #made = null; // tokens, by the last look; null: not known
  #sent = 0; // pieces of text, as what follows
  #read = 0;
  #taken = []; // what polls brought and is not read yet
  #owed = 0; // pieces that the time gone by allows

  async run() {
    setReading(true);
    at("slow-text").replaceChildren();
    this.#become("unknown");
    this.#note("");
    const unsubscribe = onStatus((status) => this.#look(status));
    try {
      await this.#readAll(this.#ending.signal);
    } catch (error) {
      await this.#breakOff(error);
    }
    unsubscribe();
    setReading(false);
  }

  stop() {
    this.#ending.abort(new Error("stopped"));
  }

  async #readAll(signal) {
    const query = new URLSearchParams({ prompt: PROMPT, max_tokens: MAX_TOKENS, ignore_eos: "true" });
    query.set("stream_options", JSON.stringify({ include_usage: true }));
    const options = { headers: { Accept: "application/json" }, late: (sentence) => this.#note(sentence) };
    const answer = await begin(`v1/generate?${query}`, options, signal);
    this.#note("");
    this.#stream = streamOf(answer);
    lookAgain();
    for (let after = -1; !this.#outcome; ) {
      const { events, next, outcome } = await this.#poll(after, signal);
      after = next - 1;
      const pieces = events.flatMap(({ data }) => data.choices?.[0]?.delta.content || []);
      this.#taken.push(...pieces);
      this.#sent += pieces.length;
      this.#made = events.find(({ data }) => data.usage)?.data.usage.completion_tokens ?? this.#made;
      if (outcome) this.#end(outcome, events.find(({ data }) => data.error)?.data.error.message);
      await this.#readTaken(signal);
    }
  }

  /** The next events. A server that doesn't answer is asked again for a while. */
  #poll(after, signal) {
    const json = { headers: { Accept: "application/json" }, signal };
    const address = `v1/streams/${this.#stream}?after=${after}&wait=${this.#taken.length ? 0 : WAIT_S}`;
    return patiently(() => askJson(address, json), signal, (sentence) => this.#note(sentence));
  }

  /** At the slider's pace, as it is from moment to moment, until it is time to ask again. */
  async #readTaken(signal) {
    const polled = performance.now();
    while (this.#taken.length && (this.#outcome || performance.now() - polled < POLL_MS)) {
      if (perSecond() === Infinity) {
        this.#take(this.#taken.length);
        return;
      }
      const looked = performance.now();
      await pause(perSecond() ? Math.min(LOOK_MS, 1000 / perSecond(), POLL_MS) : Math.min(LOOK_MS, POLL_MS), signal);
      this.#owed += (perSecond() === Infinity ? 0 : perSecond()) * ((performance.now() - looked) / 1000);
      this.#take(Math.floor(this.#owed));
      this.#owed -= Math.floor(this.#owed);
    }
  }

  #take(count) {
    const texts = this.#taken.splice(0, count);
    if (!texts.length) return;
    this.#read += texts.length;
    const text = at("slow-text");
    text.append(texts.join(""));
    text.normalize();
    text.scrollTop = text.scrollHeight;
    this.#show();
  }

  #look(status) {
    if (this.#outcome || this.#ending.signal.aborted) return;
    const mine = status?.shown.find(({ stream }) => this.#stream && stream === this.#stream.slice(0, ID_CHARS));
    this.#made = mine ? mine.completion_tokens : null;
    this.#become(mine ? mine.state : "unknown");
  }

  /** The stream has its outcome; what came before it may still be read. */
  #end(outcome, why) {
    this.#outcome = outcome;
    this.#become(ENDED_WELL.includes(outcome) ? "finished" : outcome === "cancelled" ? "cancelled" : "failed");
    if (why) this.#note(why);
  }

  /** Nothing more is asked for: the user stopped it, or something went wrong. What was read stays. */
  async #breakOff(error) {
    const stopped = this.#ending.signal.aborted;
    this.#note(stopped ? "Stopped." : this.#stream ? lossOf(error) : error.message);
    if (error.status === 401) onNextKey(() => reading === this && this.#note(""));
    if (this.#outcome) return;
    const outcome = this.#stream ? await cancel(this.#stream) : "";
    if (outcome) return this.#end(outcome);
    if (stopped && this.#stream) this.#note(UNCONFIRMED);
    this.#become(!this.#stream && error instanceof Refused ? "none" : "unknown");
  }

  #note(sentence) {
    if (at("slow-note").textContent === sentence) return;
    at("slow-note").textContent = sentence;
    if (sentence) announce(`The slow reader: ${sentence}`);
  }

  #become(state) {
    if (state !== this.#state) {
      this.#changes.push([performance.now() - this.#began, state]);
      clearTimeout(this.#telling);
      this.#telling = setTimeout(() => this.#tell(), STOOD_MS);
    }
    this.#state = state;
    this.#show();
  }

  #tell() {
    if (this.#state !== this.#told) announce(`The slow reader's stream: ${WORDS[this.#state] ?? this.#state}.`);
    this.#told = this.#state;
  }

  #show() {
    const place = at("slow-state");
    const words = WORDS[this.#state] ?? this.#state;
    place.textContent = words;
    place.dataset.state = this.#state;
    const pieces = { sent: this.#sent, read: this.#read, waits: this.#sent - this.#read };
    // The server was asked for its count a moment before the last poll.
    at("slow-made").textContent = this.#made === null ? "–" : plural(Math.max(this.#made, this.#sent), "token");
    for (const [name, count] of Object.entries(pieces)) at(`slow-${name}`).textContent = plural(count, "piece");
    paintStates(at("slow-strip"), this.#changes, performance.now() - this.#began, STRIP_MS);
    at("slow-strip").setAttribute("aria-label", `The stream's state over time; now it is ${words}`);
  }
}
