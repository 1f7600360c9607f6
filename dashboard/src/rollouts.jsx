// How new versions come in: rollouts with their guards, and roles (challengers, shadows, canaries).

import { ago, half, micros, number, percent } from "./format.js";
import { path, promoteQuestion } from "./models.jsx";
import { Action, Empty, Mark, Panel, Scroll } from "./parts.jsx";

const STATES = { running: "ok", paused: "warn", promoted: "ok", reverted: "bad", aborted: "off" };
const VERDICTS = { holds: "ok", broken: "bad", undecided: "off" };

function Rollout({ one, nowS, act }) {
  const open = one.state === "running" || one.state === "paused";
  const move = (verb) => () => act("POST", `/admin/applications/${path(one.application)}/rollout/${verb}`, {});
  return (
    <article class="rollout" aria-label={`Rollout of ${one.model} in ${one.application}`}>
      <p>
        <b>{one.model}</b> replaces {one.control} in <b>{one.application}</b> <Mark kind={STATES[one.state] ?? "off"}>{one.state}</Mark>{" "}
        <span class="muted">{one.reason} · {ago(one.stage_us, nowS)} ago</span>
      </p>
      <ol class="stages" aria-label="Stages">
        {one.stages.map((share, i) => (
          <li key={share} class={open && i === one.stage ? "now" : one.state === "promoted" || (open && i < one.stage) ? "past" : ""} aria-current={open && i === one.stage ? "step" : undefined}>{percent(share)}</li>
        ))}
      </ol>
      {open && (
        <>
          <ul class="guards">{one.guards.map((guard) => <li key={guard.guard}><Mark kind={VERDICTS[guard.outcome] ?? "off"}>{guard.guard} {guard.outcome}</Mark> <span class="muted">{guard.reason}</span></li>)}</ul>
          {one.waits && !one.guards.some((guard) => one.waits.includes(guard.reason)) && <p class="note">{one.waits}</p>}
          {one.new && one.before && <Sides one={one} />}
          <p class="row">
            {one.state === "running" ? <Action label="pause" question="Keep its share as it is?" run={move("pause")} /> : <Action label="resume" question="Restart this stage?" run={move("resume")} />}
            <Action label="promote" question={`Give all queries to ${one.model}?`} run={move("promote")} />
            <Action label="revert" danger question={`Give all queries back to ${one.control}?`} run={move("abort")} />
          </p>
        </>
      )}
    </article>
  );
}

const time = (us) => (us == null ? "–" : micros(us));

/** The figures of both versions in this stage. */
function Sides({ one }) {
  const sides = [[one.model, one.new], [one.control, one.before]];
  return (
    <Scroll label={`Figures of the rollout of ${one.model}`}>
      <table>
        <thead><tr><th scope="col">version</th><th scope="col" class="n">answers</th><th scope="col" class="n">defaults</th><th scope="col" class="n">p50</th><th scope="col" class="n">p99</th><th scope="col" class="n">reward</th></tr></thead>
        <tbody>
          {sides.map(([name, side]) => (
            <tr key={name}>
              <th scope="row">{name}</th><td class="n">{number(side.answers)}</td><td class="n">{number(side.defaults)}</td><td class="n">{time(side.p50_us)}</td><td class="n">{time(side.p99_us)}</td>
              <td class="n">{side.feedbacks ? (side.reward / side.feedbacks).toFixed(3) : "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {one.new.answers === 0 && <p class="note">{one.model} has answered nothing in this stage. A user stays with one version: with few users, none may be in its share yet.</p>}
    </Scroll>
  );
}

export function Roles({ about, now, act }) {
  const found = about.applications.flatMap((app) => Object.entries(app.roles).map(([model, role]) => ({ app, model, role })));
  const rollouts = now.rollouts ?? [];
  return (
    <Panel id="roles" title="Rollouts and roles" wide>
      {rollouts.map((one) => <Rollout key={one.application} one={one} nowS={now.t} act={act} />)}
      {found.length === 0 ? (
        rollouts.length === 0 && <Empty command="clipper rollout MODEL:VERSION --app APP --canary 5%">No rollout, challenger, shadow or canary: all linked models answer.</Empty>
      ) : (
        <Scroll label="Roles">
          <table>
            <caption>Difference: reward of the model less that of the application's answers, by feedback, with its 95 % interval</caption>
            <thead>
              <tr>
                <th scope="col">application</th><th scope="col">model</th><th scope="col">role</th><th scope="col" class="n">answered</th><th scope="col" class="n">answered beside</th>
                <th scope="col" class="n">agrees</th><th scope="col">difference</th><th scope="col" class="n">drift (PSI)</th><th scope="col"><span class="hidden">actions</span></th>
              </tr>
            </thead>
            <tbody>{found.map((one) => <RoleRow key={`${one.app.name} ${one.model}`} {...one} about={about} now={now.apps[one.app.name]} act={act} />)}</tbody>
          </table>
        </Scroll>
      )}
    </Panel>
  );
}

function RoleRow({ app, model, role, about, now, act }) {
  const id = model.includes(":") ? model : about.models.find((one) => one.name === model && one.latest)?.id ?? model;
  const mine = now?.models[id];
  const latest = about.models.find((one) => one.id === id)?.latest;
  const diff = difference(mine?.feedback, now?.feedback);
  const beside = now?.observers?.[id];
  const psi = now?.canaries?.[id]?.drift?.psi;
  return (
    <tr>
      <th scope="row">{app.name}</th>
      <td>{id}</td>
      <td>{role}</td>
      <td class="n">{number(mine?.used ?? 0)}</td>
      <td class="n">{mine?.observer ? number(mine.observer.answered) : "–"}</td>
      <td class="n">{beside?.n ? percent(beside.agreement) : mine?.agreement?.n ? percent(mine.agreement.mean) : "–"}</td>
      <td>{diff ? <Mark kind={diff.low > 0 ? "ok" : diff.high < 0 ? "bad" : "off"}>{diff.text}</Mark> : <span class="muted">no feedback yet</span>}</td>
      <td class="n">{psi == null ? "–" : <Mark kind={psi > 0.25 ? "bad" : psi > 0.1 ? "warn" : "ok"}>{number(psi)}</Mark>}</td>
      <td class="actions">
        {!latest && mine && <Action label="promote" question={promoteQuestion(about, id)} run={() => act("POST", `/admin/models/${path(id)}/promote`, {})} />}{" "}
        <Action label="revert" danger question={`Unlink ${model}? ${app.name} uses it no more.`} run={() => act("POST", `/admin/applications/${path(app.name)}/unlink`, { model })} />
      </td>
    </tr>
  );
}

export function difference(mine, all) {
  if (!mine?.n || !all?.n) return null;
  const mean = mine.mean - all.mean;
  const width = Math.hypot(half(mine.mean, mine.n), half(all.mean, all.n));
  const sign = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;
  return { low: mean - width, high: mean + width, text: `${sign(mean)} ± ${width.toFixed(3)}` };
}
