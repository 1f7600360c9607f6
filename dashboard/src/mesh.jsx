// The mesh: how full each node is, who holds what, and why.

import { useEffect, useState } from "preact/hooks";
import { request } from "./feed.js";
import { ago, bytes, number, percent } from "./format.js";
import { path } from "./models.jsx";
import { Empty, Mark, Panel, Scroll } from "./parts.jsx";

const LOOK_MS = 2000;
const ANSWER_MS = 10000;
const ROWS = 50;
const ALL_ROWS = 1000; // of which those that failed are sought
const SELDOM_MS = 10000;
const KINDS = { LOADED: "ok", LOADING: "warn", LOADING_FAILED: "bad", NOT_LOADED: "off" };
const WORDS = { LOADED: "loaded", LOADING: "loading", LOADING_FAILED: "failed", NOT_LOADED: "not loaded" };

const since = (ms, nowS) => (ms ? ago(ms * 1000, nowS) : "–");

/** Result of `read()`, repeated while the page is visible; nothing is read where it is null. */
function usePolled(read, keys, pauseMs = LOOK_MS) {
  const [found, setFound] = useState(null);
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    if (!read) {
      setFound(null);
      return undefined;
    }
    let over = false;
    let timer = 0;
    const once = async () => {
      try {
        const now = document.hidden ? undefined : await read();
        if (!over && now) {
          setFound(now);
          setTrouble("");
        }
      } catch (error) {
        if (!over) setTrouble(error.message);
      }
      // only now: a browser has six connections to a server, which unanswered requests would take
      if (!over) timer = setTimeout(once, pauseMs);
    };
    once();
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, keys);
  return [found, trouble];
}

const listed = (words) => request("GET", `/v1/mesh/models?${new URLSearchParams(words)}`, undefined, ANSWER_MS);

export function Mesh({ about, now, nowS }) {
  const [word, setWordTo] = useState("");
  const [after, setAfter] = useState([]); // ids before each page up to this one
  const setWord = (text) => {
    setWordTo(text);
    setAfter([]);
  };
  const [why, setWhy] = useState(null);
  const [nodes, trouble] = usePolled(() => request("GET", "/v1/mesh/instances", undefined, ANSWER_MS), []);
  const [models, missed] = usePolled(() => listed({ limit: ROWS, prefix: word, after: after.at(-1) ?? "" }), [word, after]);
  const failures = now.mesh?.load_failures > 0;
  const [every] = usePolled(failures ? () => listed({ limit: ALL_ROWS, prefix: word }) : null, [word, failures], SELDOM_MS);
  const failed = (every?.models ?? []).filter((one) => one.status === "LOADING_FAILED");
  const explain = async (id) => {
    if (why?.id === id) return setWhy(null);
    try {
      setWhy(await request("GET", `/v1/mesh/models/${path(id)}/explain`));
    } catch (error) {
      setWhy({ id, next: error.message, verdicts: [], history: [] });
    }
    return undefined;
  };
  const instances = nodes?.instances ?? [];
  const held = instances.reduce((sum, one) => sum + (one.models ?? 0), 0);
  return (
    <Panel id="mesh" title="Mesh" wide aside={<span class="unit">{instances.length} {instances.length === 1 ? "node" : "nodes"} · {number(now.mesh?.models_registered ?? 0)} models registered · {number(held)} loaded{failed.length > 0 && ` · ${number(failed.length)} failed`} · this is {about.mesh}</span>}>
      {(trouble || missed) && <p class="bad-text" role="alert">{trouble || missed}</p>}
      <Nodes instances={instances} nowS={nowS} />
      <div class="row pick">
        <label class="choice"><span>search by the beginning of ids</span><input type="search" value={word} onInput={(event) => setWord(event.currentTarget.value.trim())} /></label>
      </div>
      {failed.length > 0 && after.length === 0 && (
        <>
          <h3>Failed to load</h3>
          <Held models={failed.slice(0, ROWS)} label="Models that failed to load" instances={instances} nowS={nowS} why={why} explain={explain} />
          <h3>All, by id</h3>
        </>
      )}
      <Held models={models?.models ?? []} label="Copies of models by node" instances={instances} nowS={nowS} why={why} explain={explain} />
      {(after.length > 0 || models?.next) && (
        <p class="row">
          <button type="button" class="small" disabled={!after.length} onClick={() => setAfter(after.slice(0, -1))}>previous {ROWS}</button>
          <button type="button" class="small" disabled={!models?.next} onClick={() => setAfter([...after, models.next])}>next {ROWS}</button>
          <span class="note">{models?.models.length ? `${models.models[0].id} to ${models.models.at(-1).id}` : ""}</span>
        </p>
      )}
      {why && <Why why={why} close={() => setWhy(null)} />}
    </Panel>
  );
}

function Nodes({ instances, nowS }) {
  if (!instances.length) return <Empty command="clipper node --help">No node is alive.</Empty>;
  return (
    <Scroll label="Nodes of the mesh">
      <table class="nodes">
        <thead>
          <tr>
            <th scope="col">node</th><th scope="col">memory</th><th scope="col" class="n">used</th><th scope="col" class="n">capacity</th><th scope="col" class="n">models</th>
            <th scope="col" class="n">unused for up to</th><th scope="col" class="n">loading</th><th scope="col" class="n">queries/min</th><th scope="col">labels</th><th scope="col">zone</th>
          </tr>
        </thead>
        <tbody>
          {instances.map((one) => {
            const share = one.capacity_bytes ? Math.min(1, (one.used_bytes ?? 0) / one.capacity_bytes) : 0;
            return (
              <tr key={one.id}>
                <th scope="row">{one.id}{one.stopping && <span class="muted"> stops</span>}<br /><span class="muted">{one.host}</span></th>
                <td><span class="fill" role="img" aria-label={`${one.id} is ${percent(share)} full`}><span style={{ width: `${100 * share}%` }} /></span></td>
                <td class="n">{percent(share)}</td>
                <td class="n">{bytes(one.capacity_bytes ?? 0)}</td>
                <td class="n">{number(one.models ?? 0)}</td>
                <td class="n">{since(one.lru_ms, nowS)}</td>
                <td class="n">{number((one.loading ?? 0) + (one.queued ?? 0))}</td>
                <td class="n">{number(one.rate ?? 0)}</td>
                <td class="names">{one.labels?.join(", ") || <span class="muted">none</span>}</td>
                <td>{one.zone || "–"}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </Scroll>
  );
}

/** A column a node: which of these models it holds. */
function Held({ models, label, instances, nowS, why, explain }) {
  if (!models.length) return <Empty command="clipper mesh register ID models/m.onnx">No model with this prefix is registered.</Empty>;
  return (
      <Scroll label={label} tall>
        <table class="held">
          <thead>
            <tr>
              <th scope="col">model</th><th scope="col">state</th>{instances.map((one) => <th scope="col" key={one.id}>{one.id}</th>)}
              <th scope="col" class="n">size</th><th scope="col" class="n">last used</th><th scope="col"><span class="hidden">actions</span></th>
            </tr>
          </thead>
          <tbody>
            {models.map((model) => (
              <tr key={model.id}>
                <th scope="row">{model.id} <span class="muted">{model.info?.type}</span></th>
                <td><Mark kind={KINDS[model.status]}>{WORDS[model.status] ?? model.status}</Mark>{model.errors?.[0] && <div class="bad-text">{model.errors[0]}</div>}</td>
                {instances.map((one) => <td key={one.id}><Copy copy={model.copies?.find((copy) => copy.instance === one.id)} /></td>)}
                <td class="n">{bytes(Math.max(model.info?.size_bytes ?? 0, ...(model.copies ?? []).map((copy) => copy.size_bytes ?? 0)) || null)}</td>
                <td class="n">{since(model.used_ms, nowS)}</td>
                <td class="actions"><button type="button" class="small" aria-expanded={why?.id === model.id} onClick={() => explain(model.id)}>explain</button></td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
  );
}

function Copy({ copy }) {
  if (!copy) return <span class="muted" aria-label="no copy">·</span>;
  return <Mark kind={KINDS[copy.state]}><span class={copy.state === "LOADED" ? "hidden" : ""} title={copy.why}>{WORDS[copy.state]}</span></Mark>;
}

function Why({ why, close }) {
  return (
    <div class="logs" role="region" aria-label={`Placement of ${why.id}`}>
      <header><b>{why.id}</b> <span class="muted">{why.next} · clipper mesh explain {why.id}</span> <button type="button" class="small" onClick={close}>close</button></header>
      <ul class="why">
        {why.verdicts.map((one) => <li key={one.instance}><Mark kind={one.ok ? "ok" : "off"}>{one.instance}</Mark> <span class="muted">{one.why}</span></li>)}
        {why.history.map((one) => <li key={`${one.time_ms} ${one.what}`}>{new Date(one.time_ms).toLocaleTimeString("en-GB")} {one.what} <span class="muted">{one.why}</span></li>)}
      </ul>
    </div>
  );
}
