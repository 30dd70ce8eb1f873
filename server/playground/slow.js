// A reader as slow as the slider says. It asks for more only when it has read what it has: between two polls the engine
// may run one credit window ahead, and then parks the stream.

import { announce } from "./announce.js";
import { askJson, cancel, pause } from "./api.js";
import { lookAgain, onStatus } from "./engine.js";
import { plural } from "./figures.js";
import { paintStates } from "./paint.js";

const PROMPT = "Count from one upwards, in words, and do not stop.";
const MAX_TOKENS = 1500;
const LOOK_MS = 250; // how soon a moved slider is felt
const STRIP_MS = 30_000;
const ID_CHARS = 8; // of a stream's id in /status

const at = (id) => document.getElementById(id);
const rate = at("slow-rate"), start = at("slow-start"), stop = at("slow-stop");

let reading = null;

export function startSlowReader() {
  rate.addEventListener("input", showRate);
  showRate();
  start.addEventListener("click", () => {
    reading = new SlowReader();
    reading.run();
  });
  stop.addEventListener("click", () => reading?.stop());
}

const perSecond = () => (rate.value === rate.max ? Infinity : rate.valueAsNumber);

function showRate() {
  const few = perSecond() ? `${plural(perSecond(), "token")} a second` : "nothing";
  const words = perSecond() === Infinity ? "all there is" : few;
  at("slow-value").textContent = words;
  rate.setAttribute("aria-valuetext", words);
}

class SlowReader {
  #ending = new AbortController();
  #began = performance.now();
  #stream = "";
  #state = "queued";
  #changes = [[0, "queued"]]; // [ms, state]
  #made = 0;
  #sent = 0;
  #read = 0;
  #taken = []; // texts that the last poll brought and that are not read yet
  #error = "";

  async run() {
    start.disabled = true;
    stop.disabled = false;
    at("slow-text").replaceChildren();
    const unsubscribe = onStatus((status) => this.#look(status));
    try {
      await this.#readAll(this.#ending.signal);
      this.#become("finished");
    } catch (error) {
      this.#error = this.#ending.signal.aborted ? "" : error.message;
      this.#become("finished");
      if (this.#stream) await cancel(this.#stream);
    }
    unsubscribe();
    if (this.#error) at("slow-text").textContent = this.#error;
    start.disabled = false;
    stop.disabled = true;
  }

  stop() {
    this.#ending.abort(new Error("stopped"));
  }

  async #readAll(signal) {
    const json = { headers: { Accept: "application/json" }, signal };
    const query = new URLSearchParams({ prompt: PROMPT, max_tokens: MAX_TOKENS, ignore_eos: "true" });
    this.#stream = (await askJson(`v1/generate?${query}`, json)).stream;
    lookAgain();
    for (let after = -1; ; ) {
      const { events, next, outcome } = await askJson(`v1/streams/${this.#stream}?after=${after}&wait=10`, json);
      after = next - 1;
      this.#taken = events.flatMap(({ data }) => data.choices?.[0]?.delta.content || []);
      this.#sent += this.#taken.length;
      const failed = events.find(({ data }) => data.error);
      if (failed) throw new Error(failed.data.error.message);
      await this.#readTaken(signal);
      if (outcome) return;
    }
  }

  /** At the slider's pace, as it is from moment to moment. */
  async #readTaken(signal) {
    let owed = 0; // tokens that the time gone by allows
    while (this.#taken.length) {
      if (perSecond() === Infinity) {
        this.#take(this.#taken.length);
        return;
      }
      const looked = performance.now();
      await pause(perSecond() ? Math.min(LOOK_MS, 1000 / perSecond()) : LOOK_MS, signal);
      owed += (perSecond() === Infinity ? 0 : perSecond()) * ((performance.now() - looked) / 1000);
      this.#take(Math.floor(owed));
      owed -= Math.floor(owed);
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

  #look({ shown }) {
    const mine = shown.find(({ stream }) => stream === this.#stream.slice(0, ID_CHARS));
    if (!mine) return;
    this.#made = mine.completion_tokens;
    this.#become(mine.state);
  }

  #become(state) {
    if (state !== this.#state) {
      this.#changes.push([performance.now() - this.#began, state]);
      announce(`The slow reader's stream is ${state}.`);
    }
    this.#state = state;
    this.#show();
  }

  #show() {
    const place = at("slow-state");
    place.textContent = this.#state;
    place.dataset.state = this.#state;
    const made = Math.max(this.#made, this.#sent); // the look may be older than the poll
    const counts = { made, sent: this.#sent, read: this.#read, ahead: made - this.#sent };
    for (const [name, count] of Object.entries(counts)) at(`slow-${name}`).textContent = plural(count, "token");
    paintStates(at("slow-strip"), this.#changes, performance.now() - this.#began, STRIP_MS);
    at("slow-strip").setAttribute("aria-label", `The stream's state over time; now it is ${this.#state}`);
  }
}
