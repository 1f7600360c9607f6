// The mesh: how full each node is, who holds what, and why.

import { useEffect, useState } from "preact/hooks";
import { request } from "./feed.js";
import { ago, bytes, number, percent } from "./format.js";
import { path } from "./models.jsx";
import { Empty, Mark, Panel, Scroll } from "./parts.jsx";

const LOOK_MS = 2000;
const ANSWER_MS = 10000;
const ROWS = 50;
const KINDS = { LOADED: "ok", LOADING: "warn", LOADING_FAILED: "bad", NOT_LOADED: "off" };
const WORDS = { LOADED: "loaded", LOADING: "loading", LOADING_FAILED: "failed", NOT_LOADED: "not loaded" };

const since = (ms, nowS) => (ms ? ago(ms * 1000, nowS) : "–");

/** Result of `read()`, repeated while the page is visible. */
function usePolled(read, keys) {
  const [found, setFound] = useState(null);
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
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
      if (!over) timer = setTimeout(once, LOOK_MS);
    };
    once();
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, keys);
  return [found, trouble];
}

export function Mesh({ about, nowS }) {
  const [word, setWord] = useState("");
  const [why, setWhy] = useState(null);
  const [nodes, trouble] = usePolled(() => request("GET", "/v1/mesh/instances", undefined, ANSWER_MS), []);
  const [models, missed] = usePolled(() => request("GET", `/v1/mesh/models?limit=${ROWS}&prefix=${encodeURIComponent(word)}`, undefined, ANSWER_MS), [word]);
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
    <Panel id="mesh" title="Mesh" wide aside={<span class="unit">{instances.length} {instances.length === 1 ? "node" : "nodes"} · {number(held)} copies held · this is {about.mesh}</span>}>
      {(trouble || missed) && <p class="bad-text" role="alert">{trouble || missed}</p>}
      <Nodes instances={instances} nowS={nowS} />
      <div class="row pick">
        <label class="choice"><span>prefix of model ids</span><input type="search" value={word} onInput={(event) => setWord(event.currentTarget.value.trim())} /></label>
      </div>
      <Held models={models?.models ?? []} more={models?.next} instances={instances} nowS={nowS} why={why} explain={explain} />
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
            <th scope="col">node</th><th scope="col">how full</th><th scope="col" class="n">used</th><th scope="col" class="n">of</th><th scope="col" class="n">models</th>
            <th scope="col" class="n">oldest use</th><th scope="col" class="n">loading</th><th scope="col" class="n">queries/min</th><th scope="col">labels</th><th scope="col">zone</th>
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
function Held({ models, more, instances, nowS, why, explain }) {
  if (!models.length) return <Empty command="clipper mesh register ID models/m.onnx">No model with this prefix is registered.</Empty>;
  return (
    <>
      <Scroll label="Copies of models by node" tall>
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
                <td class="actions"><button type="button" class="small" aria-expanded={why?.id === model.id} onClick={() => explain(model.id)}>why</button></td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
      {more && <p class="note">The first {ROWS}, by id; there are more. <code>clipper mesh ls --after {more}</code></p>}
    </>
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
