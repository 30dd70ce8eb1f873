// What a screen reader is told: whole sentences, or what there is when the text pauses; never a token at a time.

const PAUSE_MS = 1500;
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

/** Collects a text that comes in pieces. */
export class Speaker {
  #waiting = "";
  #timer = 0;

  add(text) {
    this.#waiting += text;
    let end = 0;
    for (const found of this.#waiting.matchAll(SENTENCE_END)) end = found.index + found[0].length;
    if (end) this.#say(end);
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
