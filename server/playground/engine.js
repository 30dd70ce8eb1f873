// The live view: what `/status` says, again and again while the page is seen.

import { sentence } from "./announce.js";
import { askJson, hasKey, pause, Refused } from "./api.js";
import { paintBlocks } from "./paint.js";

const EVERY_MS = 500;
const WATCHED_MS = 200; // while somebody waits for a state to change
const AWAY_MS = 3000; // between looks at a server that doesn't answer
const STREAMS_SHOWN = 8;
const SAID_EVERY_MS = 4000; // how often the picture's description changes: a screen reader may be at it

const at = (id) => document.getElementById(id);
const { key: keyPolicy, status: statusPolicy } = document.documentElement.dataset;
const listeners = new Set();

let wake = new AbortController();
let before = null; // {at, generated} of the look before
let saidAt = -Infinity;

/** Call `listener` with each status, and with null whenever nothing is known. Returns what ends that. */
export function onStatus(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Look now: the key changed, or something began. */
export function lookAgain() {
  wake.abort();
}

export async function startEngine() {
  document.addEventListener("visibilitychange", lookAgain);
  for (;;) {
    const rest = document.hidden || !mayAsk() ? Infinity : await look();
    wake = new AbortController();
    if (rest === Infinity) await new Promise((resolve) => wake.signal.addEventListener("abort", resolve));
    else await pause(rest, wake.signal).catch(() => {});
  }
}

function mayAsk() {
  const may = statusPolicy !== "key" || keyPolicy === "none" || hasKey();
  if (!may) showNothing("unknown", "not shown", "The engine's view needs the key.");
  return may;
}

/** ms until the next look. */
async function look() {
  try {
    const status = await askJson("status", { late: (words) => showNothing("unknown", "waiting", words) });
    show(status);
    for (const listener of listeners) listener(status);
    return listeners.size ? WATCHED_MS : EVERY_MS;
  } catch (error) {
    if (!(error instanceof Refused)) {
      showNothing("down", "no connection", "No answer from the server: nothing is known of its engine.");
      return AWAY_MS;
    }
    const whose = error.status === 403 ? "The operator keeps the engine's view inside: " : "";
    showNothing("unknown", "not shown", sentence(whose + error.message));
    return Infinity;
  }
}

/** Figures of an earlier moment would be taken for those of now. */
function showNothing(state, words, why) {
  health(state, words);
  explain(why);
  before = null;
  saidAt = -Infinity;
  for (const place of document.querySelectorAll(".engine dd, .legend span, #rate")) place.textContent = "–";
  for (const pair of document.querySelectorAll(".counts .some")) pair.classList.remove("some");
  paintBlocks(at("blocks"), { used: 0, cached: 0, free: 0 });
  at("blocks").setAttribute("aria-label", "KV blocks: nothing is known now");
  at("streams").replaceChildren(lone("not known"));
  for (const listener of listeners) listener(null);
}

function explain(sentence) {
  if (at("engine-note").textContent !== sentence) at("engine-note").textContent = sentence;
}

function health(state, words) {
  const place = at("health");
  place.dataset.state = state;
  if (place.textContent !== words) place.textContent = words;
}

function show(status) {
  const { engine, streams, kv_blocks: blocks } = status;
  health(engine.up ? "up" : "down", engine.up ? "ready" : "engine down");
  explain(engine.restarts ? `Restarts of the engine: ${engine.restarts}.` : "");
  at("model").textContent = status.model;
  for (const [state, count] of Object.entries(streams)) {
    at(state).textContent = count;
    at(state).parentElement.classList.toggle("some", count > 0);
  }
  for (const kind of ["used", "cached", "free"]) at(`blocks-${kind}`).textContent = blocks[kind].toLocaleString("en");
  paintBlocks(at("blocks"), blocks);
  if (performance.now() - saidAt > SAID_EVERY_MS) {
    saidAt = performance.now();
    const { tokens_each: size, used, cached, free } = blocks;
    const words = `KV blocks of ${size} tokens: ${used} used, ${cached} cached, ${free} free`;
    at("blocks").setAttribute("aria-label", words);
  }
  showRate(status.tokens.generated);
  const rows = status.shown.slice(-STREAMS_SHOWN).map(rowOf);
  at("streams").replaceChildren(...(rows.length ? rows : [lone("none now")]));
}

function showRate(generated) {
  const now = performance.now();
  if (before) at("rate").textContent = Math.round(((generated - before.generated) * 1000) / (now - before.at));
  before = { at: now, generated };
}

/** A row of words, where there is none of a stream. */
function lone(words) {
  const row = document.createElement("tr");
  const cell = row.insertCell();
  cell.colSpan = 4;
  cell.textContent = words;
  return row;
}

function rowOf({ api, state, completion_tokens: tokens, age_s: age }) {
  const row = document.createElement("tr");
  for (const value of [api, state, tokens, `${age.toFixed(age < 10 ? 1 : 0)} s`]) {
    row.insertCell().textContent = value;
  }
  row.cells[1].className = "dot";
  row.cells[1].dataset.state = state;
  return row;
}
