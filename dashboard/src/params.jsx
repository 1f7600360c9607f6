// Tables of parameters: rows pulled and pushed, state of each shard and lag of its replicas, contents of each table.

import { Chart, columns } from "./chart.jsx";
import { ago, bytes, number, percent } from "./format.js";
import { Empty, Mark, Panel, Scroll } from "./parts.jsx";
import { COLORS, lately } from "./traffic.jsx";

const KINDS = { serves: "ok", recovers: "warn", exposed: "warn", away: "bad" };
const LATELY = 10;
const USUAL = ["not_ready", "not_admitted"]; // of who came while it recovered
const a_second = (key) => (row) => (row.params ? (row.params[key] ?? 0) / row.dt : null);
const found = (pulled, missed) => (pulled ? percent(1 - missed / pulled) : "–");

export function Params({ rows, fine, about, now, window }) {
  const { shards, tables } = now.params ?? { shards: [], tables: {} };
  const held = shards.reduce((sum, one) => sum + (one.rows ?? 0), 0);
  const size = shards.reduce((sum, one) => sum + (one.nbytes ?? 0), 0);
  const away = shards.filter((one) => one.state !== "serves");
  const words = `${shards.length} ${shards.length === 1 ? "shard" : "shards"} · ${number(held)} rows · ${bytes(size)} · ${about.params}`;
  return (
    <Panel id="params" title="Parameters" wide aside={<span class="unit">{words}</span>}>
      {away.length > 0 && (
        <p class="bad-text" role="alert">
          {away.map((one) => `Shard ${one.shard} ${{ away: "is away", recovers: "recovers", exposed: "continues without its replica" }[one.state]}`).join(". ")}. Next: <code>clipper params ps --folder {about.params}</code>
        </p>
      )}
      {!shards.length ? <Empty command={`clipper params ps --folder ${about.params}`}>No shard has answered yet.</Empty> : (
        <>
          <Charts rows={rows} window={window} />
          <Shards shards={shards} fine={fine} nowS={now.t} />
          <Tables tables={tables} />
        </>
      )}
    </Panel>
  );
}

function Charts({ rows, window }) {
  const [x, hit, miss, pushed] = columns(rows, ["hit", "miss", "pushed"].map(a_second));
  const [at, lag, behind] = columns(rows, [(row) => (row.params ? row.params.lag?.[1] ?? null : null), (row) => (row.params ? row.params.behind ?? 0 : null)]);
  const last = (values) => number(values.at(-1) ?? 0);
  return (
    <div class="two">
      <div>
        <h3>rows a second</h3>
        <Chart name="Rows of tables a second" x={x} format={(v) => number(v)} window={window} height={150}
          series={[
            { label: "pulled, trained before", color: COLORS[0], values: hit }, { label: "pulled, new", color: COLORS[1], values: miss },
            { label: "pushed", color: COLORS[2], values: pushed },
          ]}
          summary={`pulled ${last(hit)} that were trained before and ${last(miss)} new ones, pushed ${last(pushed)}`} />
      </div>
      <div>
        <h3>how far behind: gradients in versions (p99), replicas in seconds</h3>
        <Chart name="How far behind gradients and replicas are" x={at} format={(v) => number(v)} window={window} height={150}
          series={[{ label: "gradients", color: COLORS[3], values: lag }, { label: "replicas", color: COLORS[4], values: behind }]}
          summary={`gradients ${lag.at(-1) ?? "unknown"} versions, replicas ${last(behind)} seconds`} />
      </div>
    </div>
  );
}

/** work: rows pulled and pushed of the last readings. */
function Shards({ shards, fine, nowS }) {
  const seconds = lately(fine, (row) => row.dt, LATELY) || 1;
  const work = (shard, i) => lately(fine, (row) => row.params?.by?.[shard]?.[i], LATELY) / seconds;
  const each = shards.map((one) => ({ ...one, in: work(one.shard, 1), out: work(one.shard, 0) }));
  const all = each.reduce((sum, one) => sum + one.in + one.out, 0);
  const most = Math.max(...each.map((one) => one.in + one.out));
  const skew = all ? (most * each.length) / all : null;
  return (
    <Scroll label="Shards">
      <table class="shards">
        <caption>Rows and work of each shard: mean of the last {LATELY} readings.{skew !== null && each.length > 1 && ` The busiest has ${number(skew)} times the mean.`}</caption>
        <thead>
          <tr>
            <th scope="col">shard</th><th scope="col">state</th><th scope="col">share of the work</th><th scope="col" class="n">pulled/s</th><th scope="col" class="n">pushed/s</th>
            <th scope="col" class="n">rows</th><th scope="col" class="n">process</th><th scope="col" class="n">trained</th><th scope="col" class="n">lag p99</th>
            <th scope="col">replicas</th><th scope="col" class="n">snapshot</th><th scope="col" class="n">epoch</th>
          </tr>
        </thead>
        <tbody>{each.map((one) => (one.state === "away" ? <Away key={one.shard} one={one} /> : <Shard key={one.shard} one={one} all={all} nowS={nowS} />))}</tbody>
      </table>
    </Scroll>
  );
}

function Away({ one }) {
  return (
    <tr>
      <th scope="row">{one.shard}</th>
      <td><Mark kind="bad">away</Mark></td>
      <td colSpan={10} class="bad-text">{one.why}</td>
    </tr>
  );
}

function Shard({ one, all, nowS }) {
  const share = all ? (one.in + one.out) / all : 0;
  const refused = Object.entries(one.refused).filter(([why]) => !USUAL.includes(why));
  return (
    <tr>
      <th scope="row">{one.shard}</th>
      <td><Mark kind={KINDS[one.state]}>{one.state}</Mark>{refused.length > 0 && <div class="muted">refused {refused.map(([why, n]) => `${why} ${number(n)}`).join(", ")}</div>}</td>
      <td><span class="fill" role="img" aria-label={`shard ${one.shard} has ${percent(share)} of the work`}><span style={{ width: `${100 * share}%` }} /></span> <span class="muted">{all ? percent(share) : "idle"}</span></td>
      <td class="n">{number(one.out)}</td>
      <td class="n">{number(one.in)}</td>
      <td class="n">{number(one.rows)}</td>
      <td class="n">{bytes(one.rss)}</td>
      <td class="n">{found(one.pulled, one.missed)}</td>
      <td class="n">{one.lag === null ? "–" : number(one.lag)}</td>
      <td>{one.copies === 0 ? <span class="muted">none</span> : <Mark kind={one.whole === one.copies ? "ok" : "warn"}>{one.whole}/{one.copies} whole{one.behind > 0 && `, ${number(one.behind)} behind`}{one.behind_s > 0 && ` (${number(one.behind_s)} s)`}</Mark>}</td>
      <td class="n">{one.error ? <Mark kind="bad"><span title={one.error}>failed</span></Mark> : one.snapshot_us ? ago(one.snapshot_us, nowS) : "none"}</td>
      <td class="n">{number(one.epoch)}{one.recovery.source && <span class="hidden"> (back in {one.recovery.seconds.toFixed(2)} seconds from {one.recovery.source})</span>}</td>
    </tr>
  );
}

function Tables({ tables }) {
  const names = Object.keys(tables);
  if (!names.length) return <p class="note">No table yet. A model declares its own: <code>tables = {"{"}"users": {"{"}"dim": 16{"}}"}</code></p>;
  return (
    <Scroll label="Tables" tall>
      <table class="tables">
        <caption>Tables, over all shards, since each shard started</caption>
        <thead>
          <tr>
            <th scope="col">table</th><th scope="col" class="n">dim</th><th scope="col" class="n">rows</th><th scope="col" class="n">memory</th><th scope="col" class="n">pulled</th>
            <th scope="col" class="n">trained</th><th scope="col" class="n">pushed</th><th scope="col" class="n">made</th><th scope="col" class="n">evicted</th><th scope="col" class="n">expired</th><th scope="col" class="n">no room</th>
          </tr>
        </thead>
        <tbody>
          {names.map((name) => {
            const one = tables[name];
            return (
              <tr key={name}>
                <th scope="row">{name}</th>
                <td class="n">{one.dim}</td><td class="n">{number(one.rows)}</td><td class="n">{bytes(one.nbytes)}</td><td class="n">{number(one.pulled)}</td>
                <td class="n">{found(one.pulled, one.missed)}</td><td class="n">{number(one.applied)}</td><td class="n">{number(one.made)}</td>
                <td class="n">{number(one.evicted)}</td><td class="n">{number(one.expired)}</td><td class="n">{number(one.refused)}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </Scroll>
  );
}
