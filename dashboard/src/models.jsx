// What runs: models and their containers, and how they batch.

import { useState } from "preact/hooks";
import { Chart, columns } from "./chart.jsx";
import { request } from "./feed.js";
import { bytes, clock, micros, number, percent } from "./format.js";
import { Action, Empty, Mark, Panel, Scroll } from "./parts.jsx";

export const path = (name) => encodeURIComponent(name);

const KINDS = { ready: "ok", failed: "bad", held: "bad", failing: "bad", "not responding": "bad", stopped: "off" };

/** [kind of mark, the state in the words of `clipper ps`]. A model that is ready and fails queries, or is too slow, is not green. */
export function stateOf(now, id) {
  const [state, error] = now.troubles?.[id] ?? [];
  if (state === "ready" && error) return ["warn", "ready, with errors"];
  return state ? [KINDS[state] ?? "warn", state] : ["off", "not yet"];
}

/** Whether a model takes queries. */
export const isReady = (now, id) => now.troubles?.[id]?.[0] === "ready";

/** Which applications follow the latest version of a model, as a sentence. */
function followers(about, name) {
  const found = about.applications.filter((one) => one.models.includes(name)).map((one) => one.name);
  const more = found.length > 3 ? ` and ${found.length - 3} more` : "";
  return found.length ? ` ${found.slice(0, 3).join(", ")}${more} will use it.` : " No application uses it by its name alone.";
}

export const promoteQuestion = (about, id) => `Make ${id} the latest?${followers(about, id.split(":")[0])}`;

export function Models({ rows, about, now, act }) {
  const [logs, setLogs] = useState(null);
  if (!about.models.length)
    return <Panel id="models" title="Models" wide><Empty command='clipper deploy NAME module:function --input "f64[3]"'>No model is deployed.</Empty></Panel>;
  const last = rows.at(-1);
  const show = async (id) => {
    if (logs?.id === id) return setLogs(null);
    try {
      setLogs({ id, lines: (await request("GET", `/admin/models/${path(id)}/logs`)).lines });
    } catch (error) {
      setLogs({ id, lines: [error.message] });
    }
    return undefined;
  };
  return (
    <Panel id="models" title="Models" wide aside={<span class="unit">{about.models.length} in service · ★ latest version</span>}>
      <Scroll label="Models">
        <table class="models">
          <thead>
            <tr>
              <th scope="col">model</th><th scope="col">state</th><th scope="col" class="n less">containers</th><th scope="col" class="n less">memory</th>
              <th scope="col" class="n less">rows/s</th><th scope="col" class="n less">p99</th><th scope="col" class="n less">queue</th><th scope="col" class="n less">batch limit</th>
              <th scope="col" class="less">applications</th><th scope="col">last error</th><th scope="col"><span class="hidden">actions</span></th>
            </tr>
          </thead>
          <tbody>
            {about.models.map((model) => {
              const mine = now.models[model.id];
              const row = last?.models[model.id] ?? {};
              const [kind, text] = stateOf(now, model.id);
              const [, error, next] = now.troubles?.[model.id] ?? [];
              const older = about.models.some((other) => other.name === model.name && other.version < model.version);
              return (
                <tr key={model.id}>
                  <th scope="row">{model.id}{model.latest && <span title="the latest"> ★<span class="hidden"> the latest</span></span>}<br /><span class="muted">{model.input}</span></th>
                  <td><Mark kind={kind}>{text}</Mark></td>
                  <td class="n less">{mine ? `${mine.has}/${mine.wanted}` : "–"}</td>
                  <td class="n less">{bytes(mine?.replicas.reduce((sum, one) => sum + (one.rss ?? 0), 0))}</td>
                  <td class="n less">{number((row.rows ?? 0) / (last?.dt ?? 1))}</td>
                  <td class="n less">{micros(row.us?.[1])}</td>
                  <td class="n less">{number(row.queue ?? 0)}</td>
                  <td class="n less">{row.limit ?? "–"}</td>
                  <td class="names less">{model.applications.join(", ") || <span class="muted">none</span>}</td>
                  <td class="error-cell">{error ? <><span class="bad-text">{error}</span><br /><code>{next}</code></> : <span class="muted">none</span>}</td>
                  <td class="actions">
                    <button type="button" class="small" aria-expanded={logs?.id === model.id} onClick={() => show(model.id)}>logs</button>{" "}
                    {!model.latest && <Action label="promote" question={promoteQuestion(about, model.id)} run={() => act("POST", `/admin/models/${path(model.id)}/promote`, {})} />}
                    {model.latest && older && <Action label="roll back" danger question={`Go back from ${model.id} to the version before?${followers(about, model.name)}`} run={() => act("POST", `/admin/models/${path(model.name)}/rollback`, {})} />}
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </Scroll>
      {logs && (
        <div class="logs" role="region" aria-label={`Last lines of ${logs.id}`}>
          <header><b>{logs.id}</b> <span class="muted">last lines · clipper logs {logs.id}</span> <button type="button" class="small" onClick={() => setLogs(null)}>close</button></header>
          <pre tabIndex={0}>{logs.lines.length ? logs.lines.join("\n") : "No output yet."}</pre>
        </div>
      )}
    </Panel>
  );
}

/** What moved a model's batch limit, by its readings, newest first. */
export function stepsOf(rows, id, budget) {
  const steps = [];
  let before = null;
  for (const row of rows) {
    const now = row.models[id];
    if (!now?.limit) continue;
    if (before && now.limit !== before.limit) {
      const why = now.limit > before.limit ? "full batches stay within the budget"
        : now.misses ? `${now.misses} batch${now.misses > 1 ? "es" : ""} took longer than ${micros(budget)}` : "the time for a batch became shorter";
      steps.push({ t: row.t, from: before.limit, to: now.limit, why });
    }
    before = now;
  }
  return steps.reverse();
}

const MODES = {
  aimd: "grows while full batches stay within the budget, else shrinks", fit: "the most that the time allows",
  quantile: "the most that the p99 of the time allows", static: "always the most", none: "one at a time",
};

export function Batching({ rows, model, about, now, window }) {
  const record = about.models.find((one) => one.id === model);
  const mine = now.models[model];
  if (!record || !mine) return <Panel id="batching" title="Batching"><Empty command="clipper models">This model has no containers yet.</Empty></Panel>;
  const settings = record.batching ?? {};
  const budget = mine.slo_us * (settings.budget_share ?? 0.5);
  const [x, limit, size] = columns(rows, [(row) => row.models[model]?.limit, (row) => row.models[model]?.size]);
  const padding = rows.at(-1)?.models[model]?.padding;
  const profile = new Map();
  for (const one of mine.replicas) for (const [n, us, count] of one.profile ?? []) {
    const [sum, all] = profile.get(n) ?? [0, 0];
    profile.set(n, [sum + us * count, all + count]);
  }
  const sizes = [...profile.keys()].sort((a, b) => a - b);
  const times = sizes.map((n) => profile.get(n)[0] / profile.get(n)[1]);
  const steps = stepsOf(rows, model, budget);
  const full = mine.replicas.some((one) => one.limit >= settings.size_max);
  return (
    <Panel id="batching" title="Batching" aside={<span class="unit">{model} · {settings.mode ?? "aimd"}</span>}>
      <Chart name={`Batches of ${model}`} x={x} format={(v) => number(v)} window={window} stepped height={150}
        series={[{ label: "limit", color: "--c2", values: limit }, { label: "rows in a batch (mean)", color: "--c1", values: size, smooth: true }]}
        summary={`limit ${limit.at(-1) ?? "unknown"}, mean ${number(size.at(-1))} rows`} />
      {sizes.length > 0 && (
        <Chart name={`Time by size of ${model}`} x={sizes} xName="rows" numeric format={micros} height={120} summary={`one batch of ${sizes[0]} takes ${micros(times[0])}`}
          series={[{ label: "time by size of batch", color: "--c3", values: times, points: true }, { label: "budget of a batch", color: "--error", values: sizes.map(() => budget), dash: [6, 4] }]} />
      )}
      <p class="note">{full ? `At batching.size_max, ${settings.size_max} rows.` : `${settings.mode ?? "aimd"}: ${MODES[settings.mode ?? "aimd"] ?? ""}.`} A batch may take {micros(budget)}: {percent(settings.budget_share ?? 0.5)} of the tightest SLO.{padding && ` Padding: ${percent(padding)}.`}</p>
      {steps.length > 0 && (
        <ol class="steps" aria-label="Steps of the limit, newest first">
          {steps.slice(0, 4).map((one) => <li key={one.t}><time>{clock(one.t)}</time> {one.from} → <b>{one.to}</b> <span class="muted">{one.why}</span></li>)}
        </ol>
      )}
    </Panel>
  );
}
