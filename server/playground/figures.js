// Numbers as people read them, and how often tokens came.

const BYTE_UNITS = ["B", "KB", "MB"];

export function milliseconds(ms) {
  if (ms === null) return "–";
  return ms < 1000 ? `${ms.toFixed(ms < 10 ? 1 : 0)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

export function bytes(count) {
  let unit = 0;
  for (; count >= 1000 && unit < BYTE_UNITS.length - 1; unit++) count /= 1000;
  return `${count.toFixed(unit && count < 100 ? 1 : 0)} ${BYTE_UNITS[unit]}`;
}

export function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

/** When the pieces of one answer's text came. A piece is what one token adds to the text; some add none of their own. */
export class Pace {
  #began = performance.now();
  #first = null;
  #last = null;
  pieces = 0;
  longestGap = null; // ms
  arrivals = []; // ms since the begin, one for each piece

  /** So many pieces are here. */
  arrive(count = 1) {
    const now = performance.now();
    if (this.#first === null) this.#first = now;
    else this.longestGap = Math.max(this.longestGap ?? 0, now - this.#last);
    this.#last = now;
    this.pieces += count;
    for (let n = 0; n < count; n++) this.arrivals.push(now - this.#began);
  }

  /** ms, or null before the first piece. */
  get ttft() {
    return this.#first === null ? null : this.#first - this.#began;
  }

  /** The mean time between two pieces in ms, or null. */
  get itl() {
    return this.pieces > 1 ? (this.#last - this.#first) / (this.pieces - 1) : null;
  }
}
