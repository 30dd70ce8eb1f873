// How the page asks the server: the key, errors as sentences, the short-lived token for what can send no header.
// All addresses are relative, so that the page also works below a proxy's path.

let key = "";

/** The key of every request from now on. It lives in this page's memory only: a reload forgets it. */
export function setKey(value) {
  key = value.trim();
}

export function hasKey() {
  return key !== "";
}

/** A refusal, with the server's own sentence. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** fetch with the key. Rejects with Refused for a status that is no success. */
export async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  const answer = await fetch(path, { cache: "no-store", ...options, headers });
  if (!answer.ok) throw new Refused(answer.status, await sentenceOf(answer));
  return answer;
}

async function sentenceOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

export function askJson(path, options) {
  return ask(path, options).then((answer) => answer.json());
}

/** `token=…&` for the address of an EventSource or a WebSocket; "" where no key is used. */
export async function tokenField() {
  if (!key) return "";
  const { token } = await askJson("v1/access-tokens", { method: "POST" });
  return `token=${encodeURIComponent(token)}&`;
}

/** Ask the server to end a stream. Whether it still runs doesn't matter. */
export function cancel(stream) {
  return ask(`v1/streams/${stream}`, { method: "DELETE" }).catch(() => {});
}

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
