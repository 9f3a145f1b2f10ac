// Tenants and API keys: their limits. A key's value is nowhere but with its caller.

import { html } from "./vendor/lit-html/lit-html.js";
import { missing } from "./feedback.js";
import { fits } from "./format.js";
import { param, set } from "./route.js";
import { ask } from "./store.js";

const limit = (value) => value ?? "none";

export function tenantsView(draw) {
  const filter = param("q"), keys = ask("keys", draw, () => "keys");
  const head = html`<h1>Tenants</h1>`;
  if (!keys.data) return html`${head}${missing(keys, "Keys")}`;
  if (!keys.data.required) return html`${head}<p>No API keys are needed here, so that no caller has limits and no tokens are counted. <code>kyb router keys add</code> makes a key.</p>`;
  const named = (row) => fits(`${row.name || row.tenant} ${row.model || ""} ${row.tenant || ""}`, filter);
  return html`${head}
    <div class="bar"><label>Filter <input type="search" .value=${filter} @input=${(event) => set({ q: event.target.value })}></label></div>
    ${table("Limits of tenants, of each router", ["Tenant", "Models", "Priority", "Requests/min", "At a time"],
      keys.data.tenants.filter(named).map((row) => [row.name, row.models.join(", "), row.priority, limit(row.requests_per_minute), limit(row.concurrency)]),
      "No tenant: every key is a tenant without limits.")}
    ${table("API keys", ["Key", "Scopes", "Priority", "Tenant"], keys.data.keys.filter(named).map((row) => [row.name, row.scopes.join(", "), row.priority, row.tenant || "–"]), "No key fits.")}
    <p class="soft">What tenants have used: <code>kyb report usage</code>, or the metric <code>kybernate_router_tenant_tokens_total</code>.</p>`;
}

const table = (title, heads, rows, empty) => html`<h2>${title}</h2>${rows.length
  ? html`<div class="scroll" tabindex="0" role="region" aria-label=${title}><table>
    <thead><tr>${heads.map((head) => html`<th scope="col">${head}</th>`)}</tr></thead>
    <tbody>${rows.map(([first, ...others]) => html`<tr><th scope="row" class="name">${first}</th>${others.map((cell) => html`<td class=${typeof cell === "number" ? "number" : ""}>${typeof cell === "number" ? cell.toLocaleString() : cell}</td>`)}</tr>`)}</tbody></table></div>`
  : html`<p class="soft">${empty}</p>`}`;
