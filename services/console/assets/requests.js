// Requests that waited or failed, newest first; of each its story.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { missing } from "./feedback.js";
import { clock, count, fits, seconds } from "./format.js";
import { href, open, param, set } from "./route.js";
import { ask, now } from "./store.js";

const WINDOWS = [["10 min", "600"], ["1 h", ""], ["6 h", "21600"], ["24 h", "86400"]];
const MOST_ROWS = 200;

// Records of the last seconds, of a model or of all.
export function readRequests(draw, length, model = "", limit = MOST_ROWS) {
  const query = () => new URLSearchParams({ since: Math.floor(now() - length), limit, ...(model ? { model } : {}) });
  return ask(`requests ${length} ${limit} ${model}`, draw, () => `requests?${query()}`);
}

export function requestsView(draw) {
  const filter = param("q"), failed = param("failed") === "yes", length = Number(param("seconds")) || 3600;
  const answer = readRequests(draw, length, param("model"));
  const all = answer.data ? answer.data.requests : [];
  const rows = all.filter((row) => (!failed || row.status >= 400) && (!filter || fits(`${row.model} ${row.request} ${row.seat} ${row.node} ${row.reason}`, filter)));
  return html`<h1>Requests</h1>
    <div class="bar">
      <span role="group" aria-label="Window">${WINDOWS.map(([text, value]) => html`<button type="button"
        aria-pressed=${String(length === (Number(value) || 3600))} @click=${() => set({ seconds: value })}>${text}</button> `)}</span>
      <label>Filter <input type="search" placeholder="model, id, seat, error" .value=${filter} @input=${(event) => set({ q: event.target.value })}></label>
      <label><input type="checkbox" .checked=${failed} @change=${(event) => set({ failed: event.target.checked ? "yes" : "" })}> Only failed</label>
      ${param("model") ? html`<button type="button" @click=${() => set({ model: "" })}>Only ${param("model")} ×</button>` : nothing}
    </div>
    <p class="soft">Requests that waited or failed have a record for a day; those that were served at once have none. Tokens are counted
      for callers with an API key.</p>
    ${missing(answer, "Requests")}
    ${answer.data ? html`${requestTable(rows, answer.data.complete ? "" : `The newest ${all.length} of this time. `)}
      ${rows.length ? nothing : html`<p>${all.length ? "No request fits." : "No request waited or failed in this time."}</p>`}` : nothing}`;
}

export const requestTable = (rows, note = "", linked = true) => html`<div class="scroll" tabindex="0" role="region" aria-label="Table of requests"><table>
  <caption>${note}${count(rows.length, "request")}, newest first</caption>
  <thead><tr><th scope="col">Ended</th>${linked ? html`<th scope="col">Model</th>` : nothing}<th scope="col">Result</th>
    <th scope="col" class="number">Waited</th><th scope="col" class="number wide">First byte</th><th scope="col" class="number">In all</th>
    <th scope="col" class="number wide">Tokens in / out</th><th scope="col" class="number wide">Tokens/s</th><th scope="col" class="wide">Seat</th><th scope="col">Story</th></tr></thead>
  <tbody>${repeat(rows, (row) => row.id, (row) => requestRow(row, linked))}</tbody></table></div>`;

const requestRow = (row, linked) => html`<tr><td class="number">${clock(row.arrived_at + row.seconds)}</td>
  ${linked ? html`<td class="name"><a href=${href("models", row.model)}>${row.model}</a></td>` : nothing}
  <td class=${row.status >= 400 ? "bad" : ""}>${result(row)}</td>
  <td class="number">${seconds(row.held_seconds)}</td>
  <td class="number wide">${row.first_byte_seconds === undefined ? "–" : seconds(row.first_byte_seconds)}</td>
  <td class="number">${seconds(row.seconds)}</td>
  <td class="number wide">${row.completion_tokens === undefined ? "–" : `${row.prompt_tokens} / ${row.completion_tokens}`}</td>
  <td class="number wide">${speed(row)}</td>
  <td class="wide">${row.seat ? `${row.node} / ${row.seat}` : "–"}</td>
  <td><button type="button" aria-label="Story of the request ${row.request}" @click=${() => open({ request: row.request })}>…</button></td></tr>`;

const result = (row) => row.status === 499 ? "caller left" : row.status >= 400 ? `${row.status} ${row.reason || ""}` : "served";

// From the first byte to the end.
function speed(row) {
  const time = row.seconds - (row.first_byte_seconds ?? row.seconds);
  return row.completion_tokens && time > 0.001 ? (row.completion_tokens / time).toFixed(0) : "–";
}

export function requestDialog(id, draw) {
  const answer = ask(`request ${id}`, draw, () => `requests/${encodeURIComponent(id)}`, 60);
  if (!answer.data) return missing(answer, "Details");
  const { request, phases, steps } = answer.data;
  return html`<h2>${request.model}: ${result(request)}</h2>
    <dl><dt>Request</dt><dd>${request.request}</dd><dt>Arrived</dt><dd>${clock(request.arrived_at)}</dd>
      <dt>Waited, in all</dt><dd>${seconds(request.held_seconds)}, ${seconds(request.seconds)}</dd>
      ${request.trace_id ? html`<dt>Trace</dt><dd>${request.trace_id}</dd>` : nothing}</dl>
    <table><caption>Phases</caption><thead><tr><th scope="col">Phase</th><th scope="col" class="number">Time</th></tr></thead>
      <tbody>${Object.entries(phases).map(([name, value]) => html`<tr><th scope="row">${name.replaceAll("_", " ")}</th><td class="number">${seconds(value)}</td></tr>`)}</tbody></table>
    <h2>Steps since it arrived</h2>
    <ul>${steps.map((step) => html`<li>${step.at < 0 ? "−" : ""}${seconds(Math.abs(step.at))} ${step.step} ${step.model || ""} ${step.reason || ""}</li>`)}</ul>`;
}
