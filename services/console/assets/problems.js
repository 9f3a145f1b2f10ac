// The line of problems on every view: what `kyb doctor` finds, failing first.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { count } from "./format.js";
import { href } from "./route.js";
import { models, store } from "./store.js";

// A command about a model that the page shows, too (its reason, its log), leads there.
function remedy(text) {
  const [found, model] = /kyb (?:logs|why) ([^\s;,]+)/.exec(text) || [];
  if (!found || !models().some((row) => row.model === model)) return text;
  const at = text.indexOf(found);
  return html`${text.slice(0, at)}<a href=${href("models", model)}>${found}</a>${text.slice(at + found.length)}`;
}

export function problemsLine() {
  const { problems } = store;
  if (!store.since) return nothing;
  if (!problems) return html`<p class="soft">Problems are being read.</p>`;
  if (problems.error) return html`<p class="bad">${problems.error}</p>`;
  if (!problems.count) return html`<p class="soft">No problem was found.</p>`;
  const { findings } = problems, failing = findings.filter((each) => each.level === "FAIL").length;
  const first = findings[0], others = problems.count - failing;
  const counts = [failing ? count(failing, "problem") : "", others ? count(others, "warning") : ""].filter(Boolean).join(", ");
  return html`<details><summary><strong class=${failing ? "bad" : "warn"}>${counts}</strong>
      <span>${first.check}: ${first.finding}</span></summary>
    <ul>${findings.map((each) => html`<li><strong class=${each.level === "FAIL" ? "bad" : "warn"}>${each.level}</strong>
      ${each.check}: ${each.finding}${each.remedy ? html` <span class="soft">→ ${remedy(each.remedy)}</span>` : nothing}</li>`)}</ul>
    ${problems.count > findings.length ? html`<p class="soft">And ${problems.count - findings.length} more: kyb doctor lists all.</p>` : nothing}
  </details>`;
}
