// What other policies would have achieved on the feedback so far, beside the running one.

import { useState } from "preact/hooks";
import { request } from "./feed.js";
import { number } from "./format.js";
import { path } from "./models.jsx";
import { Interval, Scroll } from "./parts.jsx";

const POLICIES = ["mixture", "stacking", "exp4", "ensemble", "bandit", "squarecb", "exp3", "thompson", "kl_ucb"];

export function Evaluation({ app, running }) {
  const [policy, setPolicy] = useState("");
  const [found, setFound] = useState([]);
  const [message, setMessage] = useState("");
  const [busy, setBusy] = useState(false);
  const evaluate = async (event) => {
    event.preventDefault();
    setBusy(true);
    setMessage("");
    try {
      const each = [];
      for (const name of new Set([running, policy]))
        each.push(await request("GET", `/admin/applications/${path(app)}/evaluation?policy=${encodeURIComponent(name)}`));
      setFound([...each, ...found.filter((other) => !each.some((one) => one.policy === other.policy))]);
    } catch (error) {
      setMessage([error.message, error.hint].filter(Boolean).join(" "));
    } finally {
      setBusy(false);
    }
  };
  return (
    <form class="evaluation" onSubmit={evaluate}>
      <p class="row">
        <label class="choice">
          <span>another policy</span>
          <input list="policies" required value={policy} onInput={(event) => setPolicy(event.currentTarget.value)} />
        </label>
        <datalist id="policies">{POLICIES.map((one) => <option key={one} value={one} />)}</datalist>
        <button type="submit" disabled={busy}>{busy ? "evaluating" : "evaluate"}</button>
      </p>
      {message && <p class="note" role="alert">{message}</p>}
      {found.length > 0 && (
        <Scroll label="Other policies">
          <table>
            <caption>Accuracy on the newest feedback, estimated (doubly robust), with its 95 % interval; each policy starts untrained</caption>
            <thead><tr><th scope="col">policy</th><th scope="col" class="n">feedback</th><th scope="col" class="n">effective</th><th scope="col">accuracy</th></tr></thead>
            <tbody>
              {found.map((one) => (
                <tr key={one.policy}><th scope="row">{one.policy}{one.policy === running ? " (running)" : ""}</th><td class="n">{number(one.queries)}</td><td class="n">{number(Math.round(one.effective))}</td><td><Interval mean={one.dr.value} half={(one.dr.high - one.dr.low) / 2} color={one.policy === running ? "--c1" : "--c2"} /></td></tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
    </form>
  );
}
