// Models: who waits, how long, and against which SLO.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { seatButtons } from "./act.js";
import { byName, count, fits, seconds } from "./format.js";
import { models, now } from "./store.js";

const MOST_ROWS = 100;
const TROUBLED = new Set(["quarantined", "lost", "backoff"]);
let filter = "";
let all = false;

export function modelsView(draw) {
  const rows = models().filter((row) => fits(row.model, filter));
  rows.sort((a, b) => b.oldest - a.oldest || b.waiting - a.waiting || byName(a.model, b.model));
  const shown = all ? rows : rows.slice(0, MOST_ROWS);
  const late = rows.filter((row) => row.slo && row.oldest > row.slo).length;
  return html`<h1>Models</h1>
    <div class="bar">
      <label>Filter <input type="search" .value=${filter} @input=${(event) => { filter = event.target.value; draw(); }}></label>
      <span>${count(rows.length, "model")}, ${count(sum(rows, "waiting"), "request")} waiting,
        <span class=${late ? "bad" : "good"}>${late} beyond their SLO</span></span>
    </div>
    <div class="scroll" tabindex="0" role="region" aria-label="Table of models"><table>
      <caption>Longest wait first. p50 and p99 are of the last requests that this router forwarded, waits of 0 included. Tokens/s are those that active engines report.</caption>
      <thead><tr><th scope="col">Model</th><th scope="col">State</th>
        <th scope="col" class="number">Waiting</th><th scope="col" class="number">In flight</th>
        <th scope="col" class="number">Oldest wait / SLO</th><th scope="col" class="number">p50 / p99 wait</th>
        <th scope="col" class="number">Tokens/s</th>
        <th scope="col">Last switch</th><th scope="col">Seats</th></tr></thead>
      <tbody>${repeat(shown, (row) => row.model, modelRow)}</tbody>
    </table></div>
    ${rows.length ? nothing : html`<p>${filter ? "No model has this in its name." : "No model has a seat yet: start a pod that asks for one."}</p>`}
    ${rows.length > shown.length
      ? html`<p><button type="button" @click=${() => { all = true; draw(); }}>Show all ${rows.length}</button></p>`
      : nothing}`;
}

const modelRow = (row) => html`<tr>
  <th scope="row" class="name">${row.model}</th>
  <td>${state(row)}</td>
  <td class="number">${row.waiting}</td>
  <td class="number">${row.inFlight}</td>
  <td class="number ${row.slo && row.oldest > row.slo ? "bad" : ""}">${row.waiting ? seconds(row.oldest) : "–"}
    / ${row.slo ? seconds(row.slo) : "–"}</td>
  <td class="number">${row.waits ? `${seconds(row.waits.p50)} / ${seconds(row.waits.p99)}` : "–"}</td>
  <td class="number">${row.tokens === undefined ? "–" : Math.round(row.tokens)}</td>
  <td class="text">${row.last
    ? html`${seconds(Math.max(0, now() - row.last.at))} ago, took ${seconds(row.last.seconds)}<div class="soft">${row.last.reason}</div>`
    : "–"}</td>
  <td>${row.seats.map((seat) => html`<div class="seat"><span>${seat.seat} <span class="soft">${seat.node}/${seat.group}</span></span>
    <span>${seatButtons(seat)}</span></div>`)}</td></tr>`;

const state = (row) => {
  const seat = row.seats.find((each) => each.blocked || each.drained) || row.seats[0];
  const pinned = row.seats.some((each) => each.pinned) ? ", pinned" : "";
  const why = seat.blocked || seat.drained || (TROUBLED.has(row.state) ? seat.reason : "");
  return html`<span class=${TROUBLED.has(row.state) ? "bad" : ""}>${row.state}${pinned}</span>${why ? html`<div class="warn">${why}</div>` : nothing}`;
};

const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);
