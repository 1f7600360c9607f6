// What a person reads: the slowest queries, what happened, what is set.

import { useEffect, useState } from "preact/hooks";
import { request } from "./feed.js";
import { ago, clock, micros, shown } from "./format.js";
import { Empty, Panel, Scroll } from "./parts.jsx";

const WAITED = "--c2";
const SERVED = "--c1";

export function Slowest({ now, nowS }) {
  const rows = now.slowest ?? [];
  const most = Math.max(1, ...rows.map((row) => row.us));
  return (
    <Panel id="slowest" title="Slowest queries" aside={<span class="unit">of the last 5 min</span>}>
      {rows.length === 0 ? <Empty command="clipper predict APP VALUE">No query of an application in the last five minutes.</Empty> : (
        <Scroll label="Slowest queries" tall>
          <p class="key">
            <i class="swatch" style={{ background: `var(${WAITED})` }} aria-hidden="true" /> on the network and in the queue <i class="swatch" style={{ background: `var(${SERVED})` }} aria-hidden="true" /> in the container, by the model's usual time <i class="swatch hatched" style={{ background: "var(--error)" }} aria-hidden="true" /> no answer <i class="swatch tick" aria-hidden="true" /> the query is answered
          </p>
          <ol class="slowest">
            {rows.map((row) => (
              <li key={row.number + row.application}>
                <div class="head"><b>{micros(row.us)}</b> <span>{row.application}</span> <span class="muted">{ago(row.time_us, nowS)} ago</span>{row.reason && <span class="bad-text reason">{row.reason}</span>}</div>
                <Waterfall row={row} most={most} now={now} />
              </li>
            ))}
          </ol>
        </Scroll>
      )}
    </Panel>
  );
}

/** How long a model's batches take on average. */
function usual(model) {
  let sum = 0, n = 0;
  for (const one of model?.replicas ?? []) for (const [, us, count] of one.profile ?? []) {
    sum += us * count;
    n += count;
  }
  return n ? sum / n : null;
}

/** A bar for each model that was queried: the time until it answered. Only the total is measured; the container's part is its usual time. */
function Waterfall({ row, most, now }) {
  const at = (us) => `${(100 * us) / most}%`;
  return (
    <ul class="waterfall">
      {row.tasks.map((task) => {
        const used = row.used.includes(task.model);
        const served = usual(now.models[task.model]);
        const waited = task.status === "ok" && served !== null ? Math.max(0, task.us - served) : 0;
        const words = `${task.model}: ${task.status === "ok" ? "answered" : task.status} after ${micros(task.us)}${waited ? `, usually ${micros(served)} of it in the container` : ""}${used ? ", used" : ""}`;
        return (
          <li key={task.model} title={words}>
            <span class="who">{task.model}{used ? "" : <span class="muted"> {task.status === "ok" ? "not used" : task.status}</span>}</span>
            <span class="bars" role="img" aria-label={words}>
              {waited > 0 && <span class="bar" style={{ left: 0, width: at(waited), background: `var(${WAITED})` }} />}
              <span class={task.status === "ok" ? "bar" : "bar hatched"} style={{ left: at(waited), width: at(Math.max(task.us - waited, most / 200)), background: `var(${task.status === "ok" ? SERVED : "--error"})` }} />
              <span class="end" style={{ left: at(row.us) }} />
            </span>
            <span class="n">{micros(task.us)}</span>
          </li>
        );
      })}
    </ul>
  );
}

export function Events({ about, nowS }) {
  return (
    <Panel id="events" title="Events" aside={<span class="unit">newest first</span>}>
      {about.events.length === 0 ? <Empty command="clipper deploy --help">No events yet.</Empty> : (
        <Scroll label="Events" tall>
          <ol class="events">
            {about.events.map((one) => (
              <li key={`${one.time_us} ${one.number ?? one.model}`}>
                <time title={new Date(one.time_us / 1000).toLocaleString("en-GB")}>{nowS - one.time_us / 1e6 > 43200 ? ago(one.time_us, nowS) : clock(one.time_us / 1e6)}</time>
                {one.verb !== undefined ? (
                  <div><b>{one.verb}</b> <span class="muted">by {one.actor}</span>{one.lines.map((line) => <div class="line" key={line}>{line}</div>)}</div>
                ) : (
                  <div class={one.event === "started" || one.event === "stopped" ? "" : "bad-text"}>
                    container <b>{one.model}/{one.replica}</b> {one.event}{one.detail ? `: ${one.detail}` : ""}{one.last && <div class="line">{one.last}</div>}
                  </div>
                )}
              </li>
            ))}
          </ol>
        </Scroll>
      )}
    </Panel>
  );
}

export function Configuration() {
  const [rows, setRows] = useState(null);
  const [trouble, setTrouble] = useState("");
  const [open, setOpen] = useState(false);
  const [changed, setChanged] = useState(true);
  const [word, setWord] = useState("");
  useEffect(() => {
    if (open && !rows) request("GET", "/admin/configuration").then((found) => setRows(found.settings), (error) => setTrouble(error.message));
  }, [open]);
  const fitting = (rows ?? []).filter((row) => (!changed || row.origin !== "default") && `${row.key} ${row.text}`.toLowerCase().includes(word.toLowerCase()));
  return (
    <Panel id="configuration" title="Configuration" wide aside={<button type="button" class="small" aria-expanded={open} onClick={() => setOpen(!open)}>{open ? "hide" : "show"}</button>}>
      {!open ? <p class="note">Settings with their origin. To change one, edit the file, the environment or the command line, then run <code>clipper up</code>.</p> : (
        <>
          <div class="row">
            <label class="check"><input type="checkbox" checked={changed} onChange={(event) => setChanged(event.currentTarget.checked)} /> only what is not a default</label>
            <label class="choice"><span>find</span><input type="search" value={word} onInput={(event) => setWord(event.currentTarget.value)} /></label>
          </div>
          {trouble && <p class="bad-text" role="alert">{trouble}</p>}
          <Scroll label="Configuration" tall>
            <table>
              <thead><tr><th scope="col">key</th><th scope="col">value</th><th scope="col">unit</th><th scope="col">default</th><th scope="col">origin</th><th scope="col">description</th></tr></thead>
              <tbody>
                {fitting.map((row) => (
                  <tr key={row.key} class={row.origin === "default" ? "" : "set"}>
                    <th scope="row"><code>{row.key}</code></th><td>{shown(row.value)}</td><td>{row.unit}</td><td class="muted">{shown(row.default)}</td><td>{row.origin}</td><td class="muted">{row.text}</td>
                  </tr>
                ))}
              </tbody>
            </table>
            {rows && fitting.length === 0 && <p class="note">{changed ? "All settings have their defaults." : "No key matches."}</p>}
          </Scroll>
        </>
      )}
    </Panel>
  );
}
