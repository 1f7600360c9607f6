// The page: login, contents, reconnection.

import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { redrawAll } from "./chart.jsx";
import { request, Feed, token } from "./feed.js";
import { ago, bytes, micros, number, percent, plural } from "./format.js";
import { Configuration, Events, Slowest } from "./lists.jsx";
import { Mesh } from "./mesh.jsx";
import { Batching, isReady, Models } from "./models.jsx";
import { Params } from "./params.jsx";
import { Choice, Empty, useAddress } from "./parts.jsx";
import { Roles } from "./rollouts.jsx";
import { ALL, Cache, Latency, lately, Selection, Throughput } from "./traffic.jsx";
import { TryIt } from "./trying.jsx";
import "uplot/dist/uPlot.min.css";
import "./style.css";

const WINDOWS = { "5 min": 300, "1 h": 3600, "1 d": 86400 };
const NONE = "none yet";
// id, when it is there, title
const PANELS = [
  ["throughput", ({ apps }) => apps.length, "Throughput"],
  ["latency", ({ apps }) => apps.length, "Latency"],
  ["selection", ({ apps }) => apps.length, "Selection"],
  ["batching", ({ models }) => models.length, "Batching"],
  ["models", ({ about, models }) => models.length || !about.mesh, "Models"],
  ["mesh", ({ about }) => about.mesh, "Mesh"],
  ["params", ({ about }) => about.params, "Parameters"],
  ["try", null, "Try it"],
  ["slowest", null, "Slowest"],
  ["events", null, "Events"],
  ["cache", null, "Cache"],
  ["configuration", null, "Configuration"],
];
const THEMES = ["auto", "light", "dark"];

function Login({ trouble, onToken }) {
  const [text, setText] = useState("");
  const box = useRef(null);
  useEffect(() => box.current.focus(), [trouble]);
  const go = (event) => {
    event.preventDefault();
    if (text.trim()) onToken(text.trim());
  };
  return (
    <main id="main" class="login">
      <form onSubmit={go} class="panel">
        <h1>clipper</h1>
        <p>Management of this server needs its token: the value of <code>http.token</code>, or a link that <code>clipper dashboard</code> prints.</p>
        <label class="area" for="token"><span>token</span></label>
        <input id="token" ref={box} type="password" autocomplete="current-password" value={text} onInput={(event) => setText(event.currentTarget.value)} aria-describedby="login-trouble" />
        <p id="login-trouble" class="bad-text" role="alert">{trouble}</p>
        <button type="submit" class="primary">Log in</button>
        <p class="note">The token is stored in this tab until you close it, and is sent only as a header.</p>
      </form>
    </main>
  );
}

function Header({ feed, view, setView, paused, setPaused, theme, setTheme, onLogout }) {
  const { about } = feed;
  const words = about ? `${plural(about.applications.length, "application")} · ${plural(about.models.length, "model")} · ${about.state} · up ${ago(about.started_us, Date.now() / 1000)}` : "";
  return (
    <header class="top">
      <div class="brand"><h1>clipper</h1> <span class="muted">{about?.version}</span></div>
      <span class="muted words">{words}</span>
      <span class={`live ${paused ? "paused" : feed.state}`} role="status" title={feed.trouble}>
        {paused ? "paused" : feed.state === "live" ? "live" : feed.state === "waiting" ? "disconnected, reconnecting…" : "connecting…"}
      </span>
      <div class="tools" role="group" aria-label="View">
        {Object.keys(WINDOWS).map((name) => <button type="button" key={name} class="small" aria-pressed={view === name} onClick={() => setView(name)}>{name}</button>)}
        <button type="button" class="small" aria-pressed={paused} onClick={() => setPaused(!paused)}>{paused ? "resume" : "pause"}</button>
        <button type="button" class="small theme" onClick={() => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % 3])}>colours: {theme}</button>
        {token.get() && <button type="button" class="small" onClick={onLogout}>log out</button>}
      </div>
    </header>
  );
}

function Tiles({ fine, about, now }) {
  const seconds = lately(fine, (row) => row.dt) || 1;
  const sum = (key) => lately(fine, (row) => Object.values(row.apps).reduce((total, one) => total + (one[key] ?? 0), 0));
  const of = (key) => lately(fine, (row) => Object.values(row.models).reduce((total, one) => total + (one[key] ?? 0), 0));
  const answers = sum("ok") + sum("default") + sum("error") + sum("refused");
  const tasks = of("hits") + of("joined") + of("rows");
  const ready = about.models.filter((one) => isReady(now, one.id)).length;
  const worst = about.applications.map((app) => ({ app, us: Math.max(0, ...fine.slice(-10).map((row) => row.apps[app.name]?.us?.[2] ?? 0)) }))
    .filter((one) => one.us).sort((a, b) => b.us / b.app.slo_ms - a.us / a.app.slo_ms)[0];
  const memory = Object.values(now.models).reduce((total, one) => total + one.replicas.reduce((part, replica) => part + (replica.rss ?? 0), 0), 0);
  if (now.mesh && !about.applications.length && !about.models.length) return <MeshTiles now={now} />;
  const tiles = [
    ["queries", `${number(sum("q") / seconds)}/s`, "average of 10 s", ""],
    ["answered in time", answers ? percent(sum("ok") / answers) : "–", answers ? `${number(answers - sum("ok"))} defaults or errors` : "no queries", answers && sum("ok") / answers < 0.99 ? "bad" : ""],
    ["p99 nearest its SLO", worst ? micros(worst.us) : "–", worst ? `${worst.app.name}, SLO ${micros(worst.app.slo_ms * 1000)}` : "no queries", worst && worst.us > worst.app.slo_ms * 1000 ? "bad" : ""],
    ["answered by the cache", tasks ? percent((of("hits") + of("joined")) / tasks) : "–", `${number(tasks / seconds)} model queries/s`, ""],
    ["models ready", `${ready}/${about.models.length}`, `containers: ${bytes(memory)}`, ready < about.models.length ? "bad" : ""],
    ["in flight", number(now.in_flight), `${number(now.feedback.waiting)} can still get feedback`, ""],
  ];
  return <TileList tiles={tiles} />;
}

/** The tiles of a node of a mesh that has no applications and no models of its own. */
function MeshTiles({ now }) {
  const { mesh } = now;
  const asked = mesh.queries_hit + mesh.queries_missed;
  const tiles = [
    ["models registered", number(mesh.models_registered), "on all nodes", ""],
    ["models loaded", number(mesh.models_loaded), "on this node", ""],
    ["loads that failed", number(mesh.load_failures), "on this node, since its start", mesh.load_failures ? "bad" : ""],
    ["queries", number(asked), "since the start of this node", ""],
    ["found loaded", asked ? percent(mesh.queries_hit / asked) : "–", `${number(mesh.queries_missed)} had to wait for a load`, ""],
    ["in flight", number(now.in_flight), "on this node", ""],
  ];
  return <TileList tiles={tiles} />;
}

function TileList({ tiles }) {
  return (
    <ul class="tiles" aria-label="At a glance">
      {tiles.map(([name, value, more, kind]) => (
        <li key={name} class={kind}><span class="name">{name}</span><b>{value}{kind === "bad" && <span class="hidden"> (needs attention)</span>}</b><span class="muted">{more}</span></li>
      ))}
    </ul>
  );
}

function busiest(rows, kind, key) {
  const sums = {};
  for (const row of rows.slice(-30)) for (const [name, one] of Object.entries(row[kind])) sums[name] = (sums[name] ?? 0) + (one[key] ?? 0);
  return Object.entries(sums).sort((a, b) => b[1] - a[1])[0]?.[0];
}

/** The rows of a time: coarser ones are not there yet when the server has just started. */
function rowsOf(shot, view) {
  if (view === "1 d" && shot.day.length > 1) return shot.day;
  return view !== "5 min" && shot.coarse.length > 1 ? shot.coarse : shot.fine;
}

function Board({ shot, view, act }) {
  const { about, now } = shot;
  const window = WINDOWS[view];
  const rows = rowsOf(shot, view);
  const [app, setApp] = useAddress("application", "");
  const [model, setModel] = useAddress("model", "");
  const apps = about.applications.map((one) => one.name);
  const models = about.models.map((one) => one.id);
  const busyApp = useRef("");
  const busyModel = useRef("");
  if (!apps.includes(busyApp.current)) busyApp.current = busiest(shot.fine, "apps", "q") ?? apps[0] ?? "";
  if (!models.includes(busyModel.current)) busyModel.current = busiest(shot.fine, "models", "batches") ?? models[0] ?? "";
  const all = apps.includes(app) ? app : ALL;
  const one = apps.includes(app) ? app : busyApp.current;
  const label = all === ALL ? `${one} (busiest)` : one;
  const chosen = models.includes(model) ? model : busyModel.current;
  const nowS = now.t;
  return (
    <>
      <Tiles fine={shot.fine} about={about} now={now} />
      <div class="row pick">
        <Choice label="application" value={all} options={[ALL, ...apps]} onChange={(name) => setApp(name === ALL ? "" : name)} />
        <Choice label="model" value={chosen || NONE} options={models.length ? models : [NONE]} onChange={setModel} />
      </div>
      <nav class="jump" aria-label="Panels">
        {PANELS.filter(([, needs]) => !needs || needs({ about, apps, models })).map(([id, , title]) => <a key={id} href={`#${id}`}>{title}</a>)}
      </nav>
      {!apps.length && !about.mesh && <Empty command="clipper app set NAME --model MODEL --slo-ms 50 --default 0">No application exists yet.</Empty>}
      <div class="grid">
        {apps.length > 0 && <Throughput rows={rows} app={all} window={window} />}
        {apps.length > 0 && <Latency rows={rows} app={one} label={label} about={about} window={window} />}
        {apps.length > 0 && <Selection rows={rows} app={one} label={label} about={about} now={now} window={window} />}
        {models.length > 0 && <Batching rows={rows} model={chosen} about={about} now={now} window={window} />}
        {(models.length > 0 || !about.mesh) && <Models rows={shot.fine} about={about} now={now} act={act} />}
        {about.mesh && <Mesh about={about} now={now} nowS={nowS} />}
        {about.params && <Params rows={rows} fine={shot.fine} about={about} now={now} window={window} />}
        <Roles about={about} now={now} act={act} />
        <TryIt about={about} />
        <Slowest now={now} nowS={nowS} />
        <Events about={about} nowS={nowS} />
        <Cache rows={rows} window={window} />
        <Configuration />
      </div>
    </>
  );
}

function App() {
  const feed = useRef(null);
  const [, setTurn] = useState(0);
  const [view, setView] = useAddress("time", "5 min", (name) => name in WINDOWS);
  const [frozen, setFrozen] = useState(null);
  const [theme, setThemeTo] = useState(localStorage.getItem("clipper-theme") || "auto");
  const [toast, setToast] = useState(null);
  if (feed.current === null) feed.current = window.clipperFeed = new Feed(() => setTurn((turn) => turn + 1)); // by name, for the console
  useEffect(() => {
    feed.current.start();
    return () => feed.current.stop();
  }, []);
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("clipper-theme", theme);
    redrawAll();
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", redrawAll);
    return () => scheme.removeEventListener("change", redrawAll);
  }, [theme]);
  const current = feed.current;
  const shot = frozen ?? current;
  const act = async (method, path, body) => {
    try {
      const found = await request(method, path, body);
      setToast({ text: found.message || "Done.", kind: "ok" });
    } catch (error) {
      setToast({ text: `${error.message} ${error.hint ?? ""}`, kind: "bad" });
    }
  };
  const pause = (on) => setFrozen(on ? { about: current.about, now: current.now, fine: [...current.fine], coarse: [...current.coarse], day: [...current.day] } : null);
  const login = (text) => {
    token.set(text);
    current.become("connecting");
    current.start();
  };
  const logout = () => {
    token.set("");
    current.stop();
    Object.assign(current, { fine: [], coarse: [], day: [], about: null, now: null, lastId: "" });
    current.become("login");
  };
  if (current.state === "login") return <Login trouble={current.trouble} onToken={login} />;
  return (
    <>
      <a class="skip" href="#main">Skip to the panels</a>
      <Header feed={current} view={view} setView={setView} paused={frozen !== null} setPaused={pause} theme={theme} setTheme={setThemeTo} onLogout={logout} />
      {current.state === "waiting" && <p class="banner" role="alert">Disconnected: {current.trouble} {current.now ? `The values are ${ago(0, (performance.now() - current.readMs) / 1000)} old` : "No values yet"}; trying to reconnect.</p>}
      {shot.now?.store && <p class="banner" role="alert">{shot.now.store}</p>}
      <main id="main" tabIndex={-1}>
        {shot.about && shot.now ? <Board shot={shot} view={view} act={act} /> : <p class="empty">Waiting for the first reading…</p>}
      </main>
      <div class="toasts" aria-live="polite" role="status">
        {toast && <p class={`toast ${toast.kind}`}>{toast.text} <button type="button" class="small" onClick={() => setToast(null)}>dismiss</button></p>}
      </div>
      <footer class="muted">The numbers are those of <a href="/metrics">/metrics</a>, read once a second. <a href="/dashboard/LICENSES.txt">Licences</a></footer>
    </>
  );
}

render(<App />, document.getElementById("app"));
