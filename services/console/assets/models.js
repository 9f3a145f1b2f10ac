// Models: who waits, how long, and against which SLO.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { seatButtons } from "./act.js";
import { byName, count, fits, seconds, timing } from "./format.js";
import { href, param, set } from "./route.js";
import { counted, inTrouble, models, now, SWITCHING, TROUBLED } from "./store.js";

const MOST_ROWS = 100;
const MOST_SEATS = 3;  // of a model that are shown each
let all = false;

const SORTS = {
  "": () => true,
  waiting: (row) => row.waiting > 0,
  active: (row) => row.seats.some((seat) => seat.state === "active"),
  switching: (row) => row.seats.some((seat) => SWITCHING.has(seat.state)),
  parked: (row) => row.state === "parked",
  trouble: (row) => row.seats.some(inTrouble),
};
const NAMES = { "": "All", waiting: "Waiting", active: "Active", switching: "Switching", parked: "Parked", trouble: "In trouble" };

export function modelsView(draw) {
  const filter = param("q"), sort = Object.hasOwn(SORTS, param("state")) ? param("state") : "";
  const named = models().filter((row) => fits(row.model, filter)), rows = named.filter(SORTS[sort]);
  rows.sort((a, b) => b.oldest - a.oldest || b.waiting - a.waiting || byName(a.model, b.model));
  const shown = all ? rows : rows.slice(0, MOST_ROWS);
  const late = named.filter((row) => row.slo && row.oldest > row.slo).length;
  return html`<h1>Models</h1>
    <div class="bar">
      <label>Filter <input type="search" .value=${filter} @input=${(event) => set({ q: event.target.value })}></label>
      <span role="group" aria-label="State">${Object.keys(SORTS).map((name) => html`<button type="button" aria-pressed=${String(name === sort)}
        @click=${() => set({ state: name })}>${NAMES[name]} ${named.filter(SORTS[name]).length}</button> `)}</span>
      <span>${count(sum(named, "waiting"), "request")} waiting,
        <span class=${late ? "bad" : "good"}>${late} beyond their SLO</span></span>
    </div>
    <div class="scroll" tabindex="0" role="region" aria-label="Table of models"><table>
      <caption>Longest wait first.</caption>
      <thead><tr><th scope="col">Model</th><th scope="col">State</th>
        <th scope="col" class="number">Waiting</th><th scope="col" class="number wide">In flight</th>
        <th scope="col" class="number">Oldest wait / SLO</th>
        <th scope="col" class="wide">Last switch</th><th scope="col" class="wide">Seats</th></tr></thead>
      <tbody>${repeat(shown, (row) => row.model, modelRow)}</tbody>
    </table></div>
    ${rows.length ? nothing : html`<p>${filter || sort ? "No model fits." : "No model has a seat yet: start a pod that asks for one."}</p>`}
    ${rows.length > shown.length
      ? html`<p><button type="button" @click=${() => { all = true; draw(); }}>Show all ${rows.length}</button></p>`
      : nothing}`;
}

const modelRow = (row) => html`<tr>
  <th scope="row" class="name"><a href=${href("models", row.model)}>${row.model}</a></th>
  <td>${state(row)}</td>
  <td class="number">${row.waiting}</td>
  <td class="number wide">${row.inFlight}</td>
  <td class="number ${row.slo && row.oldest > row.slo ? "bad" : ""}">${row.waiting ? seconds(row.oldest) : "–"}
    / ${row.slo ? seconds(row.slo) : "–"}</td>
  <td class="text wide">${row.last
    ? html`${seconds(Math.max(0, now() - row.last.at))} ago, took ${seconds(row.last.seconds)}<div class="soft">${row.last.reason}</div>`
    : "–"}</td>
  <td class="wide">${row.seats.length > MOST_SEATS
    ? html`<a href=${href("models", row.model)}>${count(row.seats.length, "seat")} on ${count(new Set(row.seats.map((seat) => seat.node)).size, "node")}</a>
      <div class="soft">${counted(row.seats)}</div>`
    : row.seats.map((seat) => html`<div class="seat"><span>${seat.node}/${seat.group}</span>
    <span>${seatButtons(seat)}</span></div>`)}</td></tr>`;

// The state of the best seat, what it waits for, and since when it switches.
export function state(row) {
  const seat = row.seats.find((each) => each.blocked || each.drained) || row.seats.find((each) => each.state === row.state) || row.seats[0];
  const pinned = row.seats.some((each) => each.pinned) ? ", pinned" : "";
  const why = seat.blocked || seat.drained || (TROUBLED.has(row.state) ? seat.reason : "");
  const time = timing(seat, now());
  return html`<span class=${TROUBLED.has(row.state) ? "bad" : ""}>${row.state}${pinned}</span>
    ${time ? html`<div class="soft">${time}</div>` : nothing}${why ? html`<div class="warn">${why}</div>` : nothing}`;
}

const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);
