// A query by hand: a form made of the application's input type, its answer, and what was right.

import { useEffect, useState } from "preact/hooks";
import { request } from "./feed.js";
import { example, inputOf, micros, percent, shown } from "./format.js";
import { path } from "./models.jsx";
import { Choice, Empty, Panel } from "./parts.jsx";

const FIELDS_MAX = 12;

export function TryIt({ about }) {
  const names = about.applications.map((one) => one.name);
  const [name, setName] = useState(names[0] ?? "");
  // a model of the mesh is queried as an application of its name
  const [id, setId] = useState("");
  const onMesh = about.mesh && !about.applications.length;
  const app = onMesh ? { name: id, models: [], input: "any" } : about.applications.find((one) => one.name === name) ?? about.applications[0];
  const type = app?.input && app.input !== "any" ? app.input : about.models.find((one) => app?.models.some((link) => link === one.name || link === one.id))?.input ?? "any";
  const { dims, kind } = inputOf(type);
  const simple = dims?.length === 1 && dims[0] <= FIELDS_MAX;
  const [text, setText] = useState(example(type));
  const [answer, setAnswer] = useState(null);
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    setText(example(type));
    setAnswer(null);
  }, [onMesh ? "" : app?.name, type]);
  if (!app) return <Panel id="try" title="Try it"><Empty command="clipper app set NAME --model MODEL --slo-ms 50">There is no application to query.</Empty></Panel>;

  const values = parsed(text);
  const go = async (event) => {
    event.preventDefault();
    const input = parsed(text);
    if (input === undefined) return setAnswer({ error: `Invalid JSON. Example: ${example(type).slice(0, 60)}` });
    setBusy(true);
    try {
      setAnswer(await request("POST", `/admin/applications/${path(app.name)}/predict`, { input }));
    } catch (error) {
      setAnswer({ error: error.message, hint: error.hint });
    }
    return setBusy(false);
  };
  const change = (i, value) => {
    const next = [...(Array.isArray(values) ? values : dims.map(() => 0))];
    next[i] = value === "" ? 0 : Number(value);
    setText(JSON.stringify(next).replaceAll(",", ", "));
  };
  return (
    <Panel id="try" title="Try it" aside={<span class="unit">{type}</span>}>
      <form onSubmit={go} class="try">
        {onMesh ? (
          <label class="choice"><span>model of the mesh</span><input required value={id} placeholder="its id" onInput={(event) => setId(event.currentTarget.value.trim())} /></label>
        ) : (
          <Choice label="application" value={app.name} options={names} onChange={setName} />
        )}
        {simple && Array.isArray(values) && values.length === dims[0] ? (
          <fieldset>
            <legend>input, {dims[0]} numbers</legend>
            <div class="fields">
              {values.map((value, i) => (
                <label key={i}><span class="muted">{i}</span><input type="number" step={kind.startsWith("f") ? "any" : "1"} value={value} onInput={(event) => change(i, event.currentTarget.value)} /></label>
              ))}
            </div>
          </fieldset>
        ) : (
          <label class="area"><span>input, as JSON</span><textarea rows={3} spellcheck={false} value={text} onInput={(event) => setText(event.currentTarget.value)} /></label>
        )}
        <button type="submit" class="primary" disabled={busy}>{busy ? "sending…" : "Send query"}</button>
      </form>
      <div class="answer" aria-live="polite" role="status">{answer ? <Answer answer={answer} app={app} /> : <p class="note">The answer, the models that gave it, and the latency.</p>}</div>
    </Panel>
  );
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function Answer({ answer, app }) {
  if (answer.error) return <p class="bad-text">{answer.error} <span class="muted">{answer.hint}</span></p>;
  return (
    <>
      <p class="output">{shown(answer.output)} {answer.default && <span class="badge">the default</span>}</p>
      <dl>
        <dt>confidence</dt><dd>{percent(answer.confidence)}</dd>
        <dt>models</dt><dd>{answer.models.join(", ") || "none"}{answer.missing.length ? `; not ${answer.missing.join(", ")}` : ""}</dd>
        <dt>took</dt><dd>{answer.latency_us ? micros(answer.latency_us) : "0 (cache hit)"}{app.slo_ms ? `, of ${micros(app.slo_ms * 1000)}` : ""}</dd>
        {answer.decided_by && <><dt>decided by</dt><dd>{answer.decided_by}</dd></>}
        {answer.reason && <><dt>reason</dt><dd>{answer.reason}</dd></>}
        <dt>id</dt><dd><code>{answer.id}</code></dd>
      </dl>
      <Feedback key={answer.id} answer={answer} app={app} />
    </>
  );
}

function Feedback({ answer, app }) {
  const [label, setLabel] = useState("");
  const [message, setMessage] = useState("");
  const send = async (event) => {
    event.preventDefault();
    try {
      const found = await request("POST", `/admin/applications/${path(app.name)}/feedback`, { id: answer.id, label: parsed(label) ?? label });
      setMessage(found.counted ? "Feedback recorded." : "This answer has feedback already.");
    } catch (error) {
      setMessage(`${error.message} ${error.hint}`);
    }
  };
  return (
    <form class="row" onSubmit={send}>
      <label class="choice"><span>correct answer</span><input value={label} onInput={(event) => setLabel(event.currentTarget.value)} /></label>
      <button type="submit" class="small" disabled={!label}>Send</button> <span>{message}</span>
    </form>
  );
}
