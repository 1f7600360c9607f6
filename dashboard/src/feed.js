// Source of the page's values: a stream of events read by fetch, which (unlike EventSource) sends the token as a header. What is
// stored is bounded: five minutes by the second, an hour by ten.

export const FINE_MAX = 310;
export const COARSE_MAX = 365;
const DAY_MAX = 288; // by five minutes
const SILENT_MS = 15000; // the server sends something at least every five seconds
const PAUSE_MS_MAX = 10000;
const ANSWER_MS = 60000; // a request that is not answered by then has failed
const KEY = "clipper-token";

export const token = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY)),
};

export function headers(more = {}) {
  // A header's characters are bytes, and the server compares those of the token as UTF-8.
  const bytes = String.fromCharCode(...new TextEncoder().encode(token.get()));
  return { ...(bytes ? { Authorization: `Bearer ${bytes}` } : {}), "Clipper-Actor": "dashboard", ...more };
}

/** One request of management; throws an Error with the server's words, and `hint`, `status`. */
export async function request(method, path, body, withinMs = ANSWER_MS) {
  const more = body === undefined ? {} : { "Content-Type": "application/json" };
  const signal = AbortSignal.timeout(withinMs);
  const options = { method, headers: headers(more), body: body === undefined ? undefined : JSON.stringify(body), signal };
  let response, text;
  try {
    response = await fetch(path, options);
    text = await response.text();
  } catch (error) {
    throw Object.assign(new Error(troubleOf(error, withinMs)), { hint: "", status: 0 });
  }
  let found = {};
  try {
    found = text ? JSON.parse(text) : {};
  } catch {
    found = { detail: text.slice(0, 300) };
  }
  if (response.ok) return found;
  const error = new Error(found.detail || found.error || `HTTP ${response.status}`);
  throw Object.assign(error, { hint: found.hint || "", status: response.status });
}

/** Why a fetch failed, in words: those of the browser say "Failed to fetch". */
function troubleOf(error, withinMs) {
  if (error.name === "TimeoutError") return `The server has not answered within ${withinMs / 1000} s.`;
  return error.name === "TypeError" ? "The server cannot be reached." : error.message;
}

/** Events of `text/event-stream`, from pieces of its text. */
export function parser(onEvent) {
  let rest = "";
  return (text) => {
    rest += text;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = { name: "message", id: "", data: [] };
      for (const line of block.split("\n")) {
        if (line.startsWith("data: ")) event.data.push(line.slice(6));
        else if (line.startsWith("event: ")) event.name = line.slice(7);
        else if (line.startsWith("id: ")) event.id = line.slice(4);
      }
      if (event.data.length) onEvent(event.name, event.data.join("\n"), event.id);
    }
  };
}

/** What comes replaces what was kept from its time on: again after a reconnection, or by a clock that was set back. */
function keep(rows, row, most) {
  while (rows.length && rows[rows.length - 1].t >= row.t) rows.pop();
  rows.push(row);
  if (rows.length > most) rows.splice(0, rows.length - most);
}

export class Feed {
  constructor(onChange) {
    this.onChange = onChange;
    this.fine = [];
    this.coarse = [];
    this.day = [];
    this.about = null;
    this.now = null;
    this.readMs = 0; // when `now` came, by performance.now()
    this.state = "connecting"; // connecting, live, waiting, login, closed
    this.trouble = "";
    this.lastId = "";
    this.tries = 0;
  }

  start() {
    this.stop();
    this.control = new AbortController();
    this.run(this.control);
  }

  stop() {
    clearTimeout(this.again);
    clearTimeout(this.watch);
    const control = this.control;
    this.control = null;
    if (control) control.abort();
  }

  become(state, trouble = "") {
    this.state = state;
    this.trouble = trouble;
    this.onChange(this);
  }

  async run(control) {
    const gone = () => control !== this.control;
    try {
      this.listen(control);
      const more = this.lastId ? { "Last-Event-ID": this.lastId } : {};
      const response = await fetch("/admin/stream", { headers: headers(more), signal: control.signal, cache: "no-store" });
      if (response.status === 401) {
        const had = token.get();
        token.set("");
        this.stop();
        return this.become("login", had ? "The server does not know this token." : "");
      }
      if (!response.ok) {
        const found = await response.json().catch(() => ({}));
        throw new Error([found.detail, found.hint].filter(Boolean).join(" ") || `HTTP ${response.status}`);
      }
      const read = parser((name, data, id) => this.take(name, data, id));
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { value, done } = await reader.read();
        if (done || gone()) break;
        this.listen(control);
        read(value);
      }
      if (!gone()) this.retry("The server closed the connection.");
    } catch (error) {
      if (!gone()) this.retry(error.name === "AbortError" ? "The server has sent nothing for a while." : troubleOf(error, SILENT_MS));
    }
  }

  /** Whoever is silent for too long is gone. */
  listen(control) {
    clearTimeout(this.watch);
    this.watch = setTimeout(() => control.abort(), SILENT_MS);
  }

  retry(why) {
    clearTimeout(this.watch);
    const pause = Math.min(PAUSE_MS_MAX, 500 * 2 ** this.tries++) * (0.75 + Math.random() / 2);
    this.become("waiting", why);
    this.again = setTimeout(() => this.start(), pause);
  }

  take(name, text, id) {
    const data = JSON.parse(text);
    if (id) this.lastId = id;
    if (name === "about") this.about = data;
    else if (name === "row") keep(this.fine, data, FINE_MAX);
    else if (name === "past") for (const row of data) keep(this.fine, row, FINE_MAX);
    else if (name === "day") for (const row of data) keep(this.day, row, DAY_MAX);
    else if (name === "coarse") for (const row of data) keep(this.coarse, row, COARSE_MAX);
    else if (name === "now") {
      this.now = data;
      this.readMs = performance.now();
      this.tries = 0;
      this.become("live");
    }
  }
}
