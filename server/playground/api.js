// How the page asks the server: the key, errors as sentences, the short-lived token for what can send no header.
// All addresses are relative, so that the page also works below a proxy's path.

import { plural } from "./figures.js";

let key = "";
const keys = new EventTarget(); // "given": `key` was set
const keyMatters = document.documentElement.dataset.key === "needed";

/** How long in seconds the server keeps a stream that nobody reads (--resume-ttl). */
export const LEASE_S = Number(document.documentElement.dataset.lease);

// How long to wait before each further try, when the server doesn't answer; after the last it is given up.
export const RETURN_MS = [1000, 1000, 2000, 3000, 5000, 5000, 5000];
const BUSY = [429, 503];
const LATE_MS = 1500; // the server answers at once, if only that it has begun
const CANCEL_MS = 5000; // a server that doesn't confirm for so long is taken for silent
const LEFT_MS = 30_000; // how long a request that nobody waits for may still take to name its stream

/** The key of every request from now on. It lives in this page's memory only: a reload forgets it. Throws TypeError for
 *  one that no request can carry; then the one before stays. */
export function setKey(value) {
  new Headers({ Authorization: `Bearer ${value.trim()}` });
  key = value.trim();
  keys.dispatchEvent(new Event("given"));
}

export function hasKey() {
  return key !== "";
}

/** Call `listener` once, when the next key is given. */
export function onNextKey(listener) {
  keys.addEventListener("given", listener, { once: true });
}

/** Whether a key is given within `ms`. */
function keyWithin(ms, signal) {
  const given = new AbortController();
  onNextKey(() => given.abort());
  return pause(ms, AbortSignal.any([signal, given.signal])).then(() => false, () => {
    signal.throwIfAborted();
    return true;
  });
}

/** A refusal: `reason` is the server's own sentence, `waitS` after how many seconds it may be otherwise (0: not told). */
export class Refused extends Error {
  constructor(status, reason, waitS = 0) {
    super(waitS ? `${reason}; try again in ${waitS} s` : reason);
    Object.assign(this, { status, reason, waitS });
  }
}

/** No answer, or one that broke off: what became of the request isn't known. */
export class Unanswered extends Error {}

/** What to say of a request whose answer doesn't begin. */
export const LATE = "No answer yet." + (performance.getEntriesByType("navigation")[0]?.nextHopProtocol === "http/1.1"
  ? " Over HTTP/1.1 browsers keep six connections to a server, all tabs together: if all are taken, this waits for one."
  : "");

/** Call `late` with LATE, unless what it returns is called in time. */
export function soon(late) {
  const timer = setTimeout(late, LATE_MS, LATE);
  return () => clearTimeout(timer);
}

/** fetch with the key. Rejects with Refused for a status that is no success, and with Unanswered. `late` is called with
 *  a sentence when no answer has begun after a while. */
export async function ask(path, { late = () => {}, ...options } = {}) {
  const headers = new Headers(options.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  const request = new Request(path, { cache: "no-store", ...options, headers });
  const begun = soon(late);
  const answer = await answered(fetch(request), options.signal, "The server doesn't answer.").finally(begun);
  if (answer.ok) return answer;
  throw new Refused(answer.status, await sentenceOf(answer), Number(answer.headers.get("Retry-After")) || 0);
}

/** What `promise` gives; a failure that isn't the signal's is that of the connection. */
export function answered(promise, signal, sentence = "The connection broke.") {
  return promise.catch((error) => {
    throw signal?.aborted ? error : new Unanswered(sentence);
  });
}

/** Ask for what begins a stream. When `leaving` ends the wait before the stream has its name, the stream is cancelled as
 *  soon as it has; later, `leaving` only breaks the answer off. `options.signal` breaks it off at any time. */
export function begin(path, options, leaving) {
  if (leaving.aborted) return Promise.reject(leaving.reason);
  const own = new AbortController();
  const signal = options.signal ? AbortSignal.any([options.signal, own.signal]) : own.signal;
  const late = (sentence) => leaving.aborted || options.late?.(sentence);
  const head = ask(path, { ...options, signal, late });
  return new Promise((resolve, reject) => {
    let named = false;
    leaving.addEventListener("abort", () => {
      if (named) return own.abort();
      reject(leaving.reason);
      setTimeout(() => own.abort(), LEFT_MS);
      head.then((answer) => cancel(streamOf(answer)), () => {}).finally(() => own.abort());
    }, { once: true });
    head.then((answer) => { named = true; resolve(answer); }, reject);
  });
}

/** The id of the stream that an answer begins or goes on with. */
export function streamOf(answer) {
  return answer.headers.get("X-Stream-Id");
}

/** Sleep after the failure number `failures` (from 0 on) of a request about a stream, as long as it may pass, or until
 *  another key is given in place of a wrong one; `told` hears a sentence about it first. Rejects when nothing is to be
 *  hoped for. */
export async function waitOut(error, failures, signal, told) {
  if (error.status === 401 && keyMatters) {
    told(`${error.reason}; with a good one it goes on.`);
    if (await keyWithin(LEASE_S * 1000, signal)) return;
    throw error;
  }
  if (!(error instanceof Unanswered || BUSY.includes(error.status))) throw error;
  if (failures === RETURN_MS.length) throw error.status ? error : new Unanswered("The server can't be reached.");
  told(`${(error.reason ?? error.message).replace(/\.$/, "")}; trying again.`);
  await pause(Math.max(RETURN_MS[failures], 1000 * (error.waitS ?? 0)), signal);
}

/** What `attempt` gives, which asks about a stream: it is made again while its failures may pass. `told` hears a sentence
 *  about each, and "" when it is over. */
export async function patiently(attempt, signal, told) {
  for (let failures = 0; ; failures++) {
    try {
      const result = await attempt();
      if (failures) told("");
      return result;
    } catch (error) {
      signal.throwIfAborted();
      await waitOut(error, failures, signal, told);
    }
  }
}

/** What to say of an `error` that ends the reading of a stream that was there. */
export function lossOf(error) {
  if (error.status !== 404) return error.message;
  return "The server doesn't know this stream any more, as after a restart: the rest of the answer is lost.";
}

async function sentenceOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

export async function askJson(path, options) {
  const answer = await ask(path, options);
  return answered(answer.json(), options?.signal);
}

/** `token=…&` for the address of an EventSource or a WebSocket; "" where no key is used. */
export async function tokenField() {
  if (!key) return "";
  const { token } = await askJson("v1/access-tokens", { method: "POST" });
  return `token=${encodeURIComponent(token)}&`;
}

/** Ask the server to end a stream. Resolves to its outcome, which may be an earlier one; "" where that isn't known. */
export async function cancel(stream) {
  try {
    const signal = AbortSignal.timeout(CANCEL_MS);
    return (await askJson(`v1/streams/${stream}`, { method: "DELETE", signal })).outcome;
  } catch {
    return "";
  }
}

/** What to say of a stop for which `cancel` gave "". */
export const UNCONFIRMED =
  `Stopped here, but the server didn't confirm it. It ends a stream that nobody reads after ${plural(LEASE_S, "second")}.`;

/** The address of a WebSocket on this server. */
export function socketAddress(path) {
  const address = new URL(path, document.baseURI);
  address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
  return address.href;
}

/** Sleep, unless `signal` ends it first: then it rejects with the signal's reason. */
export function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(signal.reason);
    const end = () => { clearTimeout(timer); reject(signal.reason); };
    const timer = setTimeout(() => { signal?.removeEventListener("abort", end); resolve(); }, ms);
    signal?.addEventListener("abort", end, { once: true });
  });
}
