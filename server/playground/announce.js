// What a screen reader is told: whole sentences, what there is when the text pauses, or whole words where no sentence
// ends for a while; never a token at a time.

const PAUSE_MS = 1500;
const UNSAID_MS = 4000; // how long a text without a sentence's end may stay unsaid
const SENTENCES_KEPT = 20;
const SENTENCE_END = /[.!?…。!?:]["'”’)\]]?\s|\n/g;

const region = document.getElementById("announcements");

/** Say a sentence when the reader has finished what it says now. */
export function announce(sentence) {
  const line = document.createElement("p");
  line.textContent = sentence;
  region.append(line);
  while (region.children.length > SENTENCES_KEPT) region.firstChild.remove();
}

/** Words of the server or of ours as a sentence, so that the next one is told apart from it. */
export function sentence(words) {
  return /[.!?]$/.test(words) ? words : `${words}.`;
}

/** Collects a text that comes in pieces. */
export class Speaker {
  #waiting = "";
  #since = 0; // ms, when what waits began
  #timer = 0;

  add(text) {
    const now = performance.now();
    if (!this.#waiting) this.#since = now;
    this.#waiting += text;
    let end = 0;
    for (const found of this.#waiting.matchAll(SENTENCE_END)) end = found.index + found[0].length;
    // Where nothing parts words, as in Chinese, all of it.
    if (!end && now - this.#since > UNSAID_MS) end = this.#waiting.search(/\S*$/) || this.#waiting.length;
    if (end) {
      this.#say(end);
      this.#since = now;
    }
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.end(), PAUSE_MS);
  }

  /** Say what is left. */
  end() {
    clearTimeout(this.#timer);
    this.#say(this.#waiting.length);
  }

  #say(length) {
    const said = this.#waiting.slice(0, length).trim();
    this.#waiting = this.#waiting.slice(length);
    if (said) announce(said);
  }
}
