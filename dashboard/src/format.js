// Numbers and times as a person reads them.

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
  if (size === 0 || Number.isInteger(value)) return String(value);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : size >= 0.01 ? value.toFixed(2) : value.toPrecision(digits - 1);
}

export const percent = (share) =>
  share === null || share === undefined || Number.isNaN(share) ? "–" : `${(100 * share).toFixed(share < 1 && share > 0.995 ? 2 : 1)}\u202f%`;

export function micros(us) {
  if (us === null || us === undefined) return "–";
  if (us < 1000) return `${number(us)}\u202fµs`;
  return us < 1e6 ? `${number(us / 1000)}\u202fms` : `${number(us / 1e6)}\u202fs`;
}

export const millis = (ms) => micros(ms * 1000);

export function bytes(n) {
  if (!n) return n === 0 ? "0" : "–";
  const step = Math.min(4, Math.floor(Math.log2(n) / 10));
  return `${number(n / 2 ** (10 * step))}\u202f${["B", "KiB", "MiB", "GiB", "TiB"][step]}`;
}

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

export function ago(us, nowS) {
  const seconds = Math.max(0, nowS - us / 1e6);
  if (seconds < 90) return `${Math.round(seconds)}\u202fs`;
  if (seconds < 5400) return `${Math.round(seconds / 60)}\u202fmin`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)}\u202fh` : `${Math.round(seconds / 86400)}\u202fd`;
}

export function shown(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Half of the 95 % interval of a mean of rewards between 0 and 1: at most this, whatever their spread. */
export const half = (mean, n) => (n > 0 ? 1.96 * Math.sqrt(Math.max(mean * (1 - mean), 0.25 / (n + 4)) / n) : null);

/** Shape and element type of an input type such as `f64[3]`: {dims, kind}. */
export function inputOf(type) {
  const found = /^([a-z]+\d*)\[([\d, ]*)\]$/.exec(type || "");
  if (!found) return { kind: type || "any", dims: null };
  return { kind: found[1], dims: found[2].split(",").map(Number).filter(Boolean) };
}

export function example(type) {
  const { kind, dims } = inputOf(type);
  if (dims === null) return kind === "str" ? '"some text"' : kind === "bytes" ? '""' : "[0]";
  const size = dims.reduce((a, b) => a * b, 1);
  if (size > 4096) return "[]";
  const fill = (rest) => (rest.length ? Array.from({ length: rest[0] }, () => fill(rest.slice(1))) : 0);
  return JSON.stringify(fill(dims)).replaceAll(",", ", ");
}

/** A count with its noun: 1 model, 2 models. */
export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
