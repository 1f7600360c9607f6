// What applications do: throughput and outcomes, latency, the models they query, cache hits.

import { Chart, columns } from "./chart.jsx";
import { Evaluation } from "./evaluation.jsx";
import { half, micros, number, percent } from "./format.js";
import { Command, Empty, Interval, Panel, Scroll } from "./parts.jsx";

export const ALL = "all applications";
export const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
const OUTCOMES = [
  ["answered", "ok", "--ok"], ["default", "default", "--default"], ["error", "error", "--error"], ["refused", "refused", "--refused"],
];

const rate = (row, app, key) => {
  const apps = app === ALL ? Object.values(row.apps) : [row.apps[app] ?? {}];
  return apps.reduce((sum, one) => sum + (one[key] ?? 0), 0) / row.dt;
};

/** The sum of a count over the last rows. */
export const lately = (rows, read, n = 10) => rows.slice(-n).reduce((sum, row) => sum + (read(row) || 0), 0);

export function Throughput({ rows, app, window }) {
  const [x, ...each] = columns(rows, OUTCOMES.map(([, key]) => (row) => rate(row, app, key)));
  // drawn from the whole to its first part, each over the one before
  const piled = OUTCOMES.map((_, i) => x.map((_, at) => (each[0][at] === null ? null : each.slice(0, i + 1).reduce((sum, one) => sum + one[at], 0))));
  const series = OUTCOMES.map(([label, , color], i) => ({ label, color, fill: color, values: piled[i], shown: each[i], width: 1 })).reverse();
  const last = x.length - 1;
  const summary = last < 0 ? "No data yet." : OUTCOMES.map(([label], i) => `${label} ${number(each[i][last] ?? 0)} a second`).join(", ");
  const why = {};
  for (const row of rows.slice(-60))
    for (const [name, one] of Object.entries(row.apps))
      if (app === ALL || name === app) for (const [reason, n] of Object.entries(one.why ?? {})) why[reason] = (why[reason] ?? 0) + n;
  const reasons = Object.entries(why).sort((a, b) => b[1] - a[1]);
  return (
    <Panel id="throughput" title="Throughput and outcomes" aside={<span class="unit">answers/s</span>}>
      <Chart name={`Answers a second, ${app}`} x={x} series={series} format={(v) => number(v)} window={window} summary={summary} />
      <p class="note">
        {reasons.length === 0 ? "No defaults or errors lately." : <>Defaults and errors lately: {reasons.slice(0, 6).map(([reason, n]) => `${reason.replaceAll("_", " ")} ${number(n)}`).join(" · ")}</>}
      </p>
    </Panel>
  );
}

// label: of the application that a panel is about; if all are chosen, it marks the busiest.
export function Latency({ rows, app, label, about, window }) {
  const record = about.applications.find((one) => one.name === app);
  const slo = record ? record.slo_ms * 1000 : null;
  const part = (i) => (row) => row.apps[app]?.us?.[i];
  const [x, p50, p95, p99] = columns(rows, [part(0), part(1), part(2)]);
  const series = [
    { label: "p50", color: "--c1", values: p50 }, { label: "p95", color: "--c2", values: p95 }, { label: "p99", color: "--c4", values: p99 },
    { label: "SLO", color: "--error", values: x.map(() => slo), dash: [6, 4] },
  ];
  const us = rows.at(-1)?.apps[app]?.us;
  const summary = us ? `p50 ${micros(us[0])}, p95 ${micros(us[1])}, p99 ${micros(us[2])}, SLO ${micros(slo)}` : "No queries at the moment.";
  const over = rows.slice(-60).filter((row) => (row.apps[app]?.us?.[2] ?? 0) > slo).length;
  const seen = rows.slice(-60).filter((row) => row.apps[app]?.us).length;
  return (
    <Panel id="latency" title="Latency" aside={<span class="unit">{label}</span>}>
      <Chart name={`Latency of ${app}`} x={x} series={series} format={micros} window={window} summary={summary} />
      <p class="note">
        {seen === 0 ? "No queries lately." : over === 0 ? `p99 was within the SLO of ${micros(slo)} in each of the last ${seen} s with queries.` : `p99 was over the SLO of ${micros(slo)} in ${over} of the last ${seen} s with queries.`}
        {us && us[2] === 0 ? " All answers come from the cache." : ""}
      </p>
    </Panel>
  );
}

export function Selection({ rows, app, label, about, now, window }) {
  const record = about.applications.find((one) => one.name === app);
  const models = Object.keys(now.apps[app]?.models ?? {});
  if (!models.length)
    return <Panel id="selection" title="Selection"><Empty command={`clipper link ${app} MODEL`}>{app} has no models.</Empty></Panel>;
  const learned = rows.some((row) => Object.values(row.apps[app]?.models ?? {}).some((one) => one[0] != null));
  const used = (name) => (row) => {
    const each = row.apps[app]?.models;
    if (!each) return null;
    if (each[name]?.[0] != null) return each[name][0];
    const sum = Object.values(each).reduce((total, one) => total + (one[1] ?? 0), 0);
    return sum ? (each[name]?.[1] ?? 0) / sum : null;
  };
  const shown = models.slice(0, COLORS.length);
  let right = null;
  const byFeedback = ({ apps }) => { // of some ten readings, the latest most
    const [n, sum] = apps[app]?.fb ?? [0];
    return n ? (right = right === null ? sum / n : right + (sum / n - right) / 9) : right;
  };
  const [x, ...each] = columns(rows, [...shown.map(used), byFeedback]);
  const labels = [...shown, "accuracy"];
  const series = labels.map((label, i) => ({ label, color: COLORS[i] ?? "--error", values: each[i], dash: label !== shown[i] && [6, 4] }));
  return (
    <Panel id="selection" title="Selection" aside={<span class="unit">{label} · {record?.policy}{record?.decider !== "all" ? ` · ${record?.decider}` : ""}</span>}>
      <Chart name={`Share of each model in ${app}`} x={x} series={series} format={percent} window={window}
        summary={labels.map((name, i) => `${name} ${percent(each[i].at(-1))}`).join(", ")} />
      <Scroll label="Rewards">
        <table>
          <caption>{learned ? "Learned weight" : "Share of answers that use it"}; accuracy by feedback, 0 to 1, with its 95 % interval</caption>
          <thead><tr><th scope="col">model</th><th scope="col" class="n">share</th><th scope="col" class="n">feedback</th><th scope="col">accuracy</th></tr></thead>
          <tbody>
            {models.map((name, i) => {
              const feedback = now.apps[app].models[name].feedback;
              const width = half(feedback.mean, feedback.n);
              return (
                <tr key={name}>
                  <th scope="row"><i class="swatch" style={{ background: `var(${COLORS[i] ?? "--muted"})` }} aria-hidden="true" /> {name}</th>
                  <td class="n">{percent(each[i]?.at(-1))}</td>
                  <td class="n">{number(Math.round(feedback.n))}</td>
                  <td>{feedback.n ? <Interval mean={feedback.mean} half={width} color={COLORS[i] ?? "--muted"} /> : <span class="muted">none yet</span>}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </Scroll>
      {models.every((name) => !now.apps[app].models[name].feedback.n) && (
        <p class="note">No feedback yet. {record?.policy === "ensemble" ? "The policy does not learn from it; it measures accuracy: " : "Next: "}<Command text={`clipper feedback ${app} ID --label VALUE`} /></p>
      )}
      {models.some((name) => now.apps[app].models[name].feedback.n) && <Evaluation key={app} app={app} running={record?.policy} />}
    </Panel>
  );
}

export function Cache({ rows, window }) {
  const sum = (row, key) => Object.values(row.models).reduce((total, one) => total + (one[key] ?? 0), 0);
  const ratio = (row) => {
    const hits = sum(row, "hits"), joined = sum(row, "joined"), all = hits + joined + sum(row, "rows");
    return all ? [hits / all, joined / all] : null;
  };
  const [x, hits, joined] = columns(rows, [(row) => ratio(row)?.[0], (row) => ratio(row)?.[1]]);
  const last = rows.at(-1)?.cache ?? {};
  return (
    <Panel id="cache" title="Cache" aside={<span class="unit">share of model queries</span>}>
      <Chart name="Share of model queries answered by the cache" x={x} format={percent} window={window} height={150}
        series={[{ label: "hits", color: "--c1", values: hits }, { label: "shared with an equal query", color: "--c2", values: joined }]}
        summary={`hits ${percent(hits.at(-1))}, shared with an equal query ${percent(joined.at(-1))}`} />
      <p class="note">{number(last.entries ?? 0)} predictions · {number(last.gone ?? 0)} evicted in the last reading</p>
    </Panel>
  );
}
