// Events, newest first, with filters.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { missing } from "./feedback.js";
import { clock, fits, kind, moves, seconds } from "./format.js";
import { href, open, param, set } from "./route.js";
import { ask, store } from "./store.js";

const MOST_ROWS = 300;
let held = null;

export function eventsView(draw) {
  const events = held || store.events, wanted = param("kind"), filter = param("q");
  const kinds = [...new Set([...events.map(kind), ...(wanted ? [wanted] : [])])].sort();
  const fitting = (event) => (!wanted || kind(event) === wanted) && (!filter || fits(text(event), filter));
  const shown = [];
  for (let at = events.length - 1; at >= 0 && shown.length < MOST_ROWS; at -= 1) {
    if (fitting(events[at])) shown.push(events[at]);
  }
  return html`<h1>Events</h1>
    <div class="bar">
      <label>Kind <select @change=${(event) => set({ kind: event.target.value })}>
        <option value="">all</option>
        ${kinds.map((name) => html`<option value=${name} ?selected=${name === wanted}>${name}</option>`)}</select></label>
      <label>Filter <input type="search" placeholder="model, seat, group, cause" .value=${filter}
        @input=${(event) => set({ q: event.target.value })}></label>
      <label><input type="checkbox" .checked=${held !== null}
        @change=${(event) => { held = event.target.checked ? [...store.events] : null; draw(); }}> Pause</label>
    </div>
    <div class="scroll" tabindex="0" role="region" aria-label="Table of events"><table>
      <caption>${shown.length ? `The last ${shown.length} that fit` : "No event fits"}</caption>
      <thead><tr><th scope="col">Time</th><th scope="col">Event</th><th scope="col">Where</th><th scope="col">Model</th>
        <th scope="col">Reason</th><th scope="col">Details</th></tr></thead>
      <tbody>${repeat(shown, (event) => event.id, row)}</tbody></table></div>`;
}

const why = ({ reason }) => reason || "";

const text = (event) => [event.node, event.group, event.seat, event.model, event.victim_model, why(event), event.cause, event.op, moves(event)].join(" ");

const row = (event) => html`<tr><td class="number">${clock(event.at)}</td><td>${kind(event)}</td>
  <td class="name">${[event.node, event.group, event.gpu].filter(Boolean).join(" / ")}</td>
  <td class="name">${event.model ? html`<a href=${href("models", event.model)}>${event.model}</a>` : nothing}</td>
  <td class="text">${event.victim_model && event.model && event.victim_model !== event.model ? `in the place of ${event.victim_model}; ` : ""}${moves(event) && `${moves(event)}; `}${why(event)} ${event.seconds && event.seconds.total ? seconds(event.seconds.total) : ""}</td>
  <td>${eventButton(event)}</td></tr>`;

export const eventButton = (event) => html`<button type="button" aria-label="Details of ${kind(event)} at ${clock(event.at)}"
  @click=${() => open({ event: event.id, at: String(event.at) })}>…</button>`;

// Of an event that the page has, else of one that is stored: the address has its time.
export function eventDialog(id, draw) {
  const has = (events) => events.find((event) => event.id === id), at = param("at");
  let event = has(store.events);
  if (!event && at) {
    const answer = ask(`event ${id}`, draw, () => `history?${new URLSearchParams({ since: at, until: at })}`, 60);
    if (!answer.data) return missing(answer, "Details");
    event = has(answer.data.events);
  }
  if (!event) return html`<h2>Not found</h2><p>The event ${id} is not stored: events are kept for 7 days.</p>`;
  return html`<h2>${kind(event)}</h2><dl>${Object.entries(event).map(
    ([name, value]) => html`<dt>${name}</dt><dd>${typeof value === "object" ? JSON.stringify(value) : value}</dd>`,
  )}</dl>`;
}
