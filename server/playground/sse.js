// Bytes of text/event-stream to events, after WHATWG HTML 9.2.6 as far as our server uses it: it ends each line by LF.

export class EventParser {
  #decoder = new TextDecoder();
  #rest = "";
  #data = [];
  #id = "";

  /** The events, {data, id}, that these bytes complete. An event that the end cuts is never given. */
  feed(bytes) {
    const lines = (this.#rest + this.#decoder.decode(bytes, { stream: true })).split("\n");
    this.#rest = lines.pop();
    return lines.flatMap((line) => this.#take(line));
  }

  #take(line) {
    if (line === "") {
      const data = this.#data;
      this.#data = [];
      return data.length ? [{ data: data.join("\n"), id: this.#id }] : [];
    }
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") this.#data.push(value);
    else if (name === "id") this.#id = value;
    return [];
  }
}

/** The number in `id: <stream>:<number>`. */
export function positionOf(id) {
  return Number(id.slice(id.lastIndexOf(":") + 1));
}
