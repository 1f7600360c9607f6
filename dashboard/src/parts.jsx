// Small things that several panels are made of.

import { Fragment } from "preact";
import { useState } from "preact/hooks";

export function Panel({ id, title, aside, wide, children }) {
  return (
    <section class={wide ? "panel wide" : "panel"} aria-labelledby={`${id}-title`} id={id}>
      <header><h2 id={`${id}-title`}>{title}</h2>{aside}</header>
      {children}
    </section>
  );
}

/** A command, whose words are not broken: a hyphen at the end of a line would be taken for one of its own. */
export const Command = ({ text }) => <code class="command">{text.split(" ").map((word, at) => <Fragment key={at}>{at ? " " : ""}<span>{word}</span></Fragment>)}</code>;

export function Empty({ children, command }) {
  return <p class="empty">{children}{command && <><br />Next: <Command text={command} /></>}</p>;
}

const MARKS = { ok: "●", warn: "▲", bad: "■", off: "○" };

export const Mark = ({ kind, children }) => <span class={`mark ${kind}`}><span aria-hidden="true">{MARKS[kind]}</span> {children}</span>;

/** A button with a confirmation, whose question says what follows. */
export function Action({ label, question, run, danger }) {
  const [confirming, setConfirming] = useState(false);
  const [busy, setBusy] = useState(false);
  const go = async () => {
    setBusy(true);
    try {
      await run();
    } finally {
      setBusy(false);
      setConfirming(false);
    }
  };
  if (!confirming) return <button type="button" class="small" onClick={() => setConfirming(true)}>{label}</button>;
  return (
    <span class="confirm" role="group" aria-label={question}>
      {question}{" "}
      <button type="button" class={danger ? "small danger" : "small primary"} disabled={busy} onClick={go}>{label}</button>{" "}
      <button type="button" class="small" onClick={() => setConfirming(false)} autoFocus>cancel</button>
    </span>
  );
}

/** A value that is also in the address of the page, so that it can be kept and sent. */
export function useAddress(name, usual, isOne = () => true) {
  const given = new URLSearchParams(location.search).get(name);
  const [value, setValue] = useState(given !== null && isOne(given) ? given : usual);
  const change = (now) => {
    setValue(now);
    const words = new URLSearchParams(location.search);
    if (now === usual) words.delete(name);
    else words.set(name, now);
    history.replaceState(null, "", `${location.pathname}${words.size ? `?${words}` : ""}${location.hash}`);
  };
  return [value, change];
}

export function Choice({ label, value, options, onChange }) {
  return (
    <label class="choice">
      <span>{label}</span>
      <select value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {options.map((one) => <option key={one} value={one}>{one}</option>)}
      </select>
    </label>
  );
}

/** Cells that may be wider than a small screen scroll by themselves, by keyboard too. */
export function Scroll({ label, children, tall }) {
  return <div class={tall ? "scroll tall" : "scroll"} tabIndex={0} role="group" aria-label={label}>{children}</div>;
}

/** A mean of 0 to 1 on a track, with its interval. */
export function Interval({ mean, half: width, color }) {
  const low = Math.max(0, mean - width), high = Math.min(1, mean + width);
  return (
    <span class="interval">
      <span class="track" aria-hidden="true">
        <span class="range" style={{ left: `${100 * low}%`, width: `${100 * (high - low)}%`, background: `var(${color})` }} />
        <span class="dot" style={{ left: `${100 * mean}%`, background: `var(${color})` }} />
      </span>
      <span>{mean.toFixed(3)} ± {width.toFixed(3)}</span>
    </span>
  );
}
