// The conversation: what was said, the answer as it comes, the cut, and what came of it.

import { announce, Speaker } from "./announce.js";
import { ask, cancel, lossOf, UNCONFIRMED } from "./api.js";
import { complain, onPress, setUsable } from "./controls.js";
import { milliseconds, Pace, plural } from "./figures.js";
import { Follower, SHOWN_CUT_MS } from "./follow.js";

const NEAR_THE_END_PX = 40;

const at = (id) => document.getElementById(id);
const log = at("log"), message = at("message"), send = at("send"), stop = at("stop"), cut = at("cut");
const welcome = at("welcome"), temperature = at("temperature"), maxTokens = at("max-tokens");

let turns = [];
let following = true; // until somebody scrolls up to read
let current = null; // the answer that is being read

export function startChat() {
  at("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    say(message.value, message);
  });
  message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    say(message.value, message);
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
  at("settings").addEventListener("toggle", keepUp); // they take their room from the log's
  onPress(stop, () => current.stop());
  onPress(cut, () => current.cut());
  setBusy(false);
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

/** Send `text`, unless one of the fields that it takes (`from` is its own) can't be sent. */
async function say(text, ...from) {
  if (current || complain([...from, temperature, maxTokens])) return;
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
  if (!content && answer.failed) message.value ||= text;
  current = null;
  setBusy(false);
}

function setBusy(busy) {
  setUsable(send, !busy);
  setUsable(stop, busy);
  setUsable(cut, false); // until there is something to cut
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
  #usage = null;
  #error = "";
  #seam = ""; // the last cut
  #afterwards = null; // what the ledger says once an answer begins, in place of why none did
  #limit = maxTokens.valueAsNumber;

  constructor() {
    this.#meta.className = "meta";
    this.#ledger.className = "ledger";
    this.#turn.append(this.#meta, this.#ledger);
    this.#turn.dataset.state = "waiting";
    keepUp();
    const told = {
      event: (data) => this.#take(data),
      begun: () => this.#showBegin(),
      late: (sentence) => this.#showLate(sentence),
      away: (onPurpose, said) => this.#showAway(onPurpose, said),
      resumed: (position) => this.#showReturn(position),
    };
    this.#follower = new Follower(told, this.#ending.signal);
  }

  /** The text, once all of it is here or nothing more comes. */
  async read(messages) {
    const body = {
      messages,
      stream: true,
      stream_options: { include_usage: true },
      temperature: temperature.valueAsNumber,
      max_tokens: this.#limit,
    };
    const options = {
      method: "POST",
      headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
      body: JSON.stringify(body),
    };
    try {
      await this.#follower.read("v1/chat/completions", options);
    } catch (error) {
      if (!this.#ending.signal.aborted) this.#error = this.#follower.stream ? lossOf(error) : error.message;
    }
    this.#speaker.end();
    this.#show();
    await this.#end();
    return this.#text;
  }

  stop() {
    if (this.#ending.signal.aborted) return;
    this.#ending.abort(new Error("stopped"));
    const { stream } = this.#follower;
    if (stream) cancel(stream).then((outcome) => outcome || this.#note(UNCONFIRMED));
  }

  get failed() {
    return this.#error !== "";
  }

  cut() {
    setUsable(cut, false);
    this.#follower.cut();
  }

  #take(data) {
    if (data.error) {
      this.#error = data.error.message;
      return;
    }
    if (data.usage) this.#usage = data.usage;
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
    const { ttft, itl } = this.#pace;
    const parts = [this.#length(), `first after ${milliseconds(ttft)}`];
    if (itl) parts.push(`${(1000 / itl).toFixed(itl > 50 ? 1 : 0)} a second`);
    if (this.#follower.position >= 0) parts.push(`event ${this.#follower.position}`);
    return parts.join(" · ");
  }

  /** The tokens, once the server has told how many they are; until then the pieces of text that came. */
  #length() {
    return this.#usage ? plural(this.#usage.completion_tokens, "token") : plural(this.#pace.pieces, "piece");
  }

  /** Only what is known is said: that the server parks a stream that nobody reads is its own affair, and in its view. */
  #showAway(onPurpose, said) {
    this.#show();
    setUsable(cut, false);
    if (said) {
      this.#afterwards = "Answered after trying again.";
      return this.#note(said);
    }
    this.#turn.dataset.state = "cut";
    const seam = document.createElement("span");
    seam.className = "seam";
    this.#seam = seam.title = placeOf(this.#follower.position);
    this.#body.append(seam);
    const back = onPurpose ? `coming back in ${SHOWN_CUT_MS / 1000} s` : "trying again";
    this.#note(`${this.#seam}. Nobody reads now; ${back}.`);
  }

  #showBegin() {
    setUsable(cut, true);
    if (this.#afterwards !== null) this.#note(this.#afterwards);
    this.#afterwards = null;
  }

  #showLate(sentence) {
    this.#afterwards ??= "";
    this.#note(sentence);
  }

  #showReturn(position) {
    this.#turn.dataset.state = "typing";
    this.#note(`${this.#seam || placeOf(position - 1)}, resumed with event ${position}.`);
  }

  #note(sentence) {
    if (this.#ledger.textContent === sentence) return;
    this.#ledger.textContent = sentence;
    this.#show();
    if (sentence) announce(sentence);
  }

  async #end() {
    const stopped = this.#ending.signal.aborted;
    this.#turn.dataset.state = this.#error ? "failed" : "done";
    if (this.#error) this.#note(this.#error);
    else if (stopped) this.#note("Stopped.");
    else if (this.#follower.cuts || this.#reason === "length") this.#note(await this.#verdict());
    else announce(`The answer ends after ${this.#length()}.`);
  }

  async #verdict() {
    const sentences = this.#follower.cuts ? [await this.#account()] : [];
    if (this.#reason === "length") {
      const whose = this.#usage?.completion_tokens === this.#limit ? "the limit in Settings" : "a limit of the server";
      sentences.push(`Ended at ${whose}: ${this.#length()}.`);
    }
    return sentences.join(" ");
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

function placeOf(position) {
  return position < 0 ? "Cut before the first event" : `Cut behind event ${position}`;
}
