// The conversation: what was said, the answer as it comes, the cut, and what came of it.

import { announce, Speaker } from "./announce.js";
import { ask, cancel } from "./api.js";
import { milliseconds, Pace, plural } from "./figures.js";
import { Follower } from "./follow.js";

const NEAR_THE_END_PX = 40;

const at = (id) => document.getElementById(id);
const log = at("log"), message = at("message"), send = at("send"), stop = at("stop"), cut = at("cut");
const welcome = at("welcome");

let turns = [];
let following = true; // until somebody scrolls up to read
let current = null; // the answer that is being read

export function startChat() {
  at("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    say(message.value);
  });
  message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    say(message.value);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") current?.stop();
  });
  for (const button of welcome.querySelectorAll("button")) {
    button.addEventListener("click", () => say(button.textContent));
  }
  let top = 0;
  log.addEventListener("scroll", () => {
    if (log.scrollTop < top) following = false; // only people scroll up
    if (log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_THE_END_PX) following = true;
    top = log.scrollTop;
  });
  stop.addEventListener("click", () => current?.stop());
  cut.addEventListener("click", () => current?.cut());
  at("new-chat").addEventListener("click", clear);
}

function clear() {
  current?.stop();
  current = null;
  setBusy(false);
  turns = [];
  log.replaceChildren(welcome);
  message.focus();
}

async function say(text) {
  if (current || !text.trim()) return;
  message.value = "";
  welcome.remove();
  turns.push({ role: "user", content: text });
  addTurn("you", text);
  const answer = (current = new Answer());
  setBusy(true);
  message.focus();
  const content = await answer.read(turns);
  if (current !== answer) return; // a new chat was begun meanwhile
  if (content) turns.push({ role: "assistant", content });
  else turns.pop();
  current = null;
  setBusy(false);
}

function setBusy(busy) {
  send.disabled = busy;
  stop.disabled = cut.disabled = !busy;
}

function addTurn(who, text = "") {
  const turn = document.createElement("article");
  turn.className = `turn ${who}`;
  turn.setAttribute("aria-label", who === "you" ? "You" : "Model");
  const body = document.createElement("div");
  body.className = "body";
  body.append(text);
  turn.append(body);
  log.append(turn);
  following = true;
  keepUp();
  return turn;
}

function keepUp() {
  if (following) log.scrollTop = log.scrollHeight;
}

class Answer {
  #turn = addTurn("model");
  #body = this.#turn.firstChild;
  #meta = document.createElement("p");
  #ledger = document.createElement("p");
  #ending = new AbortController();
  #pace = new Pace();
  #speaker = new Speaker();
  #follower;
  #text = "";
  #unshown = "";
  #reason = "";
  #error = "";

  constructor() {
    this.#meta.className = "meta";
    this.#ledger.className = "ledger";
    this.#turn.append(this.#meta, this.#ledger);
    this.#turn.dataset.state = "waiting";
    keepUp();
    const told = {
      event: (data) => this.#take(data),
      cut: (position) => this.#showCut(position),
      resumed: (position) => this.#showReturn(position),
    };
    this.#follower = new Follower(told, this.#ending.signal);
  }

  /** The text, once all of it is here or nothing more comes. */
  async read(messages) {
    const body = {
      messages,
      stream: true,
      temperature: numberIn("temperature"),
      max_tokens: numberIn("max-tokens"),
    };
    const options = {
      method: "POST",
      headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
      body: JSON.stringify(body),
    };
    try {
      await this.#follower.read("v1/chat/completions", options);
    } catch (error) {
      if (!this.#ending.signal.aborted) this.#error = error.message;
    }
    this.#speaker.end();
    this.#show();
    await this.#end();
    return this.#text;
  }

  stop() {
    if (this.#ending.signal.aborted) return;
    this.#ending.abort(new Error("stopped"));
    if (this.#follower.stream) cancel(this.#follower.stream);
  }

  cut() {
    cut.disabled = true;
    this.#follower.cut();
  }

  #take(data) {
    if (data.error) {
      this.#error = data.error.message;
      return;
    }
    const choice = data.choices[0];
    if (choice?.finish_reason) this.#reason = choice.finish_reason;
    const text = choice?.delta.content;
    if (!text) return;
    this.#turn.dataset.state = "typing";
    this.#pace.arrive();
    this.#text += text;
    this.#speaker.add(text);
    if (!this.#unshown) requestAnimationFrame(() => this.#show());
    this.#unshown += text;
  }

  /** Put what came since the last frame on the page. */
  #show() {
    // Models like to begin with a space, which is the text's but nothing to look at.
    this.#body.append(this.#body.textContent ? this.#unshown : this.#unshown.trimStart());
    this.#unshown = "";
    this.#body.normalize();
    this.#meta.textContent = this.#figures();
    keepUp();
  }

  #figures() {
    const { tokens, ttft, itl } = this.#pace;
    const parts = [plural(tokens, "token"), `first after ${milliseconds(ttft)}`];
    if (itl) parts.push(`${(1000 / itl).toFixed(itl > 50 ? 1 : 0)} a second`);
    if (this.#follower.position >= 0) parts.push(`event ${this.#follower.position}`);
    return parts.join(" · ");
  }

  #showCut(position) {
    this.#show();
    this.#turn.dataset.state = "cut";
    const seam = document.createElement("span");
    seam.className = "seam";
    seam.title = `cut behind event ${position}`;
    this.#body.append(seam);
    this.#note(`Cut behind event ${position}. Nobody reads now: the stream is parked, and waits.`);
  }

  #showReturn(position) {
    this.#turn.dataset.state = "typing";
    cut.disabled = false;
    this.#note(`Cut behind event ${position - 1}, resumed with event ${position}.`);
  }

  #note(sentence) {
    this.#ledger.textContent = sentence;
    this.#show();
    announce(sentence);
  }

  async #end() {
    const stopped = this.#ending.signal.aborted;
    const length = plural(this.#pace.tokens, "token");
    this.#turn.dataset.state = this.#error ? "failed" : "done";
    if (this.#error) this.#note(this.#error);
    else if (stopped) this.#note("Stopped.");
    else if (this.#follower.cuts) this.#note(await this.#account());
    else if (this.#reason === "length") this.#note(`Cut here: ${length} are the most that Settings allow.`);
    else announce(`The answer ends after ${length}.`);
  }

  /** Whether the text that came in pieces is the one that the server holds. */
  async #account() {
    const { cuts, lost, doubled, stream } = this.#follower;
    const counts = `${plural(cuts, "cut")}: ${lost} events lost, ${doubled} doubled`;
    try {
      const whole = await ask(`v1/streams/${stream}`, { headers: { Accept: "text/plain" } });
      const same = (await whole.text()) === this.#text;
      return `${counts}. Read again as a whole, the text is ${same ? "the same" : "NOT the same"}.`;
    } catch {
      return `${counts}.`;
    }
  }
}

function numberIn(id) {
  const field = at(id);
  return field.value === "" || !field.checkValidity() ? Number(field.defaultValue) : field.valueAsNumber;
}
