// The race: the same prompt at temperature 0, so that all four say the same, and what each of them costs.

import { announce, sentence } from "./announce.js";
import { answered, begin, cancel, lossOf, onNextKey, soon, tokenField, UNCONFIRMED } from "./api.js";
import { complain, onPress, setUsable } from "./controls.js";
import { bytes, milliseconds, Pace } from "./figures.js";
import { LANES } from "./lanes.js";
import { paintTicks } from "./paint.js";

const FIGURES = ["TTFT", "ITL, mean", "longest gap", "pieces", "bytes", "requests"];
const SPAN_STEP_MS = 2000;
const TOO_LONG = [414, 431]; // of an address, or of a request's head

const at = (id) => document.getElementById(id);
const start = at("race-start"), stop = at("race-stop");
const views = LANES.map(makeView);

let ending = null;

export function startRace() {
  at("race-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!ending && !complain([at("race-prompt"), at("race-tokens")])) race();
  });
  onPress(stop, () => ending.abort(new Error("stopped")));
  setRacing(false);
}

function setRacing(racing) {
  setUsable(start, !racing);
  setUsable(stop, racing);
}

async function race() {
  ending = new AbortController();
  const { signal } = ending;
  setRacing(true);
  const lanes = LANES.map((lane, n) => new Lane(lane, views[n]));
  const query = queryOf(at("race-tokens").value);
  // What is refused now each lane would be refused, and not all of them would hear why.
  const token = prepare(signal, (words) => lanes.forEach((lane) => lane.wait(words)));
  let racing = true;
  const paint = () => {
    const latest = Math.max(...lanes.map((lane) => lane.pace.arrivals.at(-1) ?? 0));
    const span = SPAN_STEP_MS * (1 + Math.floor(latest / SPAN_STEP_MS));
    for (const lane of lanes) lane.show(span);
    if (racing) requestAnimationFrame(paint);
  };
  paint();
  await Promise.all(lanes.map((lane) => lane.run(query, token, signal)));
  racing = false;
  paint();
  const some = lanes.some((lane) => lane.pace.pieces);
  const end = signal.aborted ? "The race was stopped." : some ? "The race is over." : "The race brought no text.";
  announce(`${end} ${lanes.map((lane) => lane.summary).join(" ")}`);
  ending = null;
  setRacing(false);
}

function queryOf(maxTokens) {
  return new URLSearchParams({ prompt: at("race-prompt").value, max_tokens: maxTokens, temperature: "0" }).toString();
}

/** Of four equal prompts the first is computed for all, and would win: so that is done before. And the token is here
 *  before anyone needs it. */
async function prepare(signal, late) {
  // Bare text that is cancelled ends as a fault, which the browser would log.
  const headers = { Accept: "application/x-ndjson" };
  const answer = await begin(`v1/generate?${queryOf(1)}`, { headers, late }, signal);
  await answered(answer.text(), signal);
  const token = await tokenField();
  signal.throwIfAborted();
  return token;
}

function makeView({ name, note }) {
  const card = document.createElement("article");
  card.className = "lane";
  const title = document.createElement("h3");
  const small = document.createElement("small");
  small.textContent = note;
  title.append(`${name} `, small);
  const strip = document.createElement("canvas");
  strip.className = "strip";
  strip.setAttribute("role", "img");
  strip.setAttribute("aria-label", `${name}: when its text came`);
  const list = document.createElement("dl");
  list.className = "figures";
  const values = FIGURES.map((figure) => {
    const [pair, term, value] = ["div", "dt", "dd"].map((name) => document.createElement(name));
    term.textContent = figure;
    value.textContent = "–";
    pair.append(term, value);
    list.append(pair);
    return value;
  });
  const text = document.createElement("p");
  text.className = "text";
  text.tabIndex = 0;
  text.setAttribute("role", "region");
  text.setAttribute("aria-label", `${name}: the answer`);
  const error = document.createElement("p");
  error.className = "ledger";
  card.append(title, strip, list, text, error);
  at("lanes").append(card);
  return { card, strip, values, text, note: error };
}

class Lane {
  pace = new Pace();
  #lane;
  #view;
  #bytes = 0;
  #requests = 0;
  #unshown = "";
  #error = "";
  #waits = ""; // why nothing comes now

  constructor(lane, view) {
    this.#lane = lane;
    this.#view = view;
    view.text.replaceChildren();
    view.card.dataset.state = "running";
  }

  async run(query, token, signal) {
    let begun = () => {};
    const told = {
      token: "",
      stream: undefined,
      requests: () => this.#requests++,
      waits: (words) => this.wait(words),
      bytes: (count) => {
        this.#bytes += count;
        begun();
        this.wait("");
      },
      tokens: (texts) => {
        if (texts.length) this.pace.arrive(texts.length);
        this.#unshown += texts.join("");
      },
    };
    try {
      told.token = await token;
      this.pace = new Pace(); // what was prepared is no part of the race
      this.wait("");
      begun = soon(told.waits); // a first event comes as soon as the server has the request
      await this.#lane.run(query, told, signal);
      this.#view.card.dataset.state = "done";
    } catch (error) {
      this.#view.card.dataset.state = signal.aborted ? "done" : "failed";
      if (!signal.aborted) this.#fail(error, told.stream);
      const outcome = told.stream ? await cancel(told.stream) : "";
      if (signal.aborted && told.stream && !outcome) this.#error = UNCONFIRMED;
    }
    begun();
    this.wait("");
  }

  #fail(error, stream) {
    this.#error = stream ? lossOf(error) : error.message;
    if (TOO_LONG.includes(error.status)) this.#error = "The prompt is too long for an address, where the race puts it.";
    if (error.status !== 401) return;
    const { note } = this.#view;
    onNextKey(() => note.textContent === this.#error && note.replaceChildren());
  }

  wait(words) {
    this.#waits = words;
  }

  show(span) {
    const { pace } = this;
    const { strip, values, text, note } = this.#view;
    const shown = [milliseconds(pace.ttft), milliseconds(pace.itl), milliseconds(pace.longestGap), pace.pieces];
    shown.push(bytes(this.#bytes), this.#requests);
    shown.forEach((value, n) => (values[n].textContent = value));
    paintTicks(strip, pace.arrivals, span);
    if (this.#unshown) {
      text.append(this.#unshown);
      text.normalize();
      text.scrollTop = text.scrollHeight;
      this.#unshown = "";
    }
    const words = this.#error || this.#waits;
    if (note.textContent !== words) note.textContent = words;
  }

  get summary() {
    const { ttft, longestGap } = this.pace;
    const came = ttft === null ? "nothing came." : `first text after ${milliseconds(ttft)}, longest gap ${milliseconds(longestGap)}.`;
    return `${this.#lane.name}: ${sentence(this.#error || came)}`;
  }
}
