// The line of problems on every view: what `kyb doctor` finds, failing first.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { count } from "./format.js";
import { href } from "./route.js";
import { models, store } from "./store.js";

// Each command about a model, a group or a node leads there: the page has its reason, its log, its buttons.
function remedy(text) {
  const rows = models(), places = new Map(rows.map((row) => [row.model, href("models", row.model)]));
  const put = (name, node) => places.has(name) || places.set(name, href("nodes", node));
  for (const seat of rows.flatMap((row) => row.seats)) [seat.group, seat.node].forEach((name) => put(name, seat.node));
  return text.split(/(kyb [a-z]+ (?:group |node )?[^\s;,]+)/).map((part, at) => {
    const to = at % 2 && places.get(part.split(" ").at(-1));
    return to ? html`<a href=${to}>${part}</a>` : part;
  });
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
