// One model: its seats, what they wait for, switches, requests, settings and the engine's log.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { seatButtons } from "./act.js";
import { vramChart } from "./charts.js";
import { eventButton } from "./events.js";
import { missing, say } from "./feedback.js";
import { bytes, clock, count, moves, seconds, timing } from "./format.js";
import { state } from "./models.js";
import { placed } from "./nodes.js";
import { readRequests, requestTable } from "./requests.js";
import { href, param, set } from "./route.js";
import { ask, counted, models, now, sortOf } from "./store.js";

const MOST_SEATS = 20;
const MOST_NODES = 10;  // whose managers are asked
const MOST_ROWS = 20;
const PAST_SECONDS = 3600;
const ORDER = ["in trouble", "switching", "active", "parked"];
let all = "";

export function modelPage(name, draw) {
  const row = models().find((each) => each.model === name);
  const head = html`<h1><a href="#models">Models</a> / ${name}</h1>`;
  if (!row) return html`${head}<p>No seat has this model now.</p>${switches(name, draw)}${requests(name, draw)}`;
  const why = readWhy(row, draw), until = now();
  return html`${head}
    <dl class="facts"><div><dt>State</dt><dd>${state(row)}</dd></div>
      <div><dt>Requests</dt><dd>${row.waiting} wait, ${row.inFlight} in flight</dd></div>
      <div><dt>Oldest wait / SLO</dt><dd class=${row.slo && row.oldest > row.slo ? "bad" : ""}>${row.waiting ? seconds(row.oldest) : "–"} / ${row.slo ? seconds(row.slo) : "–"}</dd></div>
      <div><dt>Seats</dt><dd>${counted(row.seats)}</dd></div></dl>
    ${missing(why.answer, "Reasons")}
    ${seats(row, why, draw)}
    <p><a href=${href("timeline", "", { q: name })}>Its groups in the timeline</a></p>
    ${vramChart("VRAM of its seats", row.seats, 0, until - 600, until)}
    ${switches(name, draw)}
    ${requests(name, draw)}
    ${settings(row, why)}
    ${log(row, draw)}`;
}

// What the managers of its nodes say: by node and seat.
function readWhy(row, draw) {
  const nodes = [...new Set(row.seats.map((seat) => seat.node))].slice(0, MOST_NODES);
  const answer = ask(`why ${nodes.join(" ")}`, draw, () => `why?${new URLSearchParams(nodes.map((node) => ["node", node]))}`);
  const seats = new Map(), groups = new Map();
  for (const node of answer.data ? answer.data.nodes : []) {
    for (const group of node.groups || []) {
      groups.set(`${node.node}/${group.group}`, group.why);
      for (const seat of group.seats) seats.set(`${node.node} ${seat.seat}`, seat);
    }
    if (node.unanswered) groups.set(node.node, node.unanswered);
  }
  return { answer, of: (seat) => seats.get(`${seat.node} ${seat.seat}`), group: (seat) => groups.get(`${seat.node}/${seat.group}`) || groups.get(seat.node) || "" };
}

function seats(row, why, draw) {
  const sorted = [...row.seats].sort((a, b) => ORDER.indexOf(sortOf(a)) - ORDER.indexOf(sortOf(b)));
  const shown = all === row.model ? sorted : sorted.slice(0, MOST_SEATS);
  return html`<h2>Seats</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="Seats of ${row.model}"><table>
      <thead><tr><th scope="col">Where</th><th scope="col">State</th><th scope="col">Why</th><th scope="col" class="number wide">VRAM</th>
        <th scope="col" class="number wide">Host RAM</th><th scope="col">Commands</th></tr></thead>
      <tbody>${repeat(shown, (seat) => seat.key, (seat) => seatRow(seat, why, row.seats.length > 1))}</tbody></table></div>
    ${sorted.length > shown.length
      ? html`<p><button type="button" @click=${() => { all = row.model; draw(); }}>Show all ${count(sorted.length, "seat")}</button></p>` : nothing}`;
}

function seatRow(seat, why, several) {
  const explained = why.of(seat), stage = explained && explained.stage && seat.since <= why.answer.at ? explained.stage : null;
  const late = stage && stage.clock && stage.clock.late;
  const texts = [seat.blocked || seat.drained || (stage && stage.text) || seat.reason, why.group(seat) && `its group: ${why.group(seat)}`];
  return html`<tr><th scope="row" class="name"><a href=${href("nodes", seat.node)}>${seat.node}</a>/${placed(seat)}
      ${several ? html`<div class="soft">${seat.seat}</div>` : nothing}</th>
    <td class=${late || sortOf(seat) === "in trouble" ? "bad" : ""}>${seat.state}${seat.pinned ? ", pinned" : ""} ${timing(seat, now())}${late ? " – later than usual" : ""}</td>
    <td class="text">${texts.filter(Boolean).map((text) => html`<div>${text}</div>`)}</td>
    <td class="number wide">${bytes(seat.vram_bytes)}</td><td class="number wide">${seat.state === "parked" ? bytes(seat.host_bytes) : "–"}</td>
    <td class="acts">${seatButtons(seat)}</td></tr>`;
}

// Switches to and from it in the last hour, starts on another group included, and how long each took.
function switches(name, draw) {
  const answer = ask(`switches ${name}`, draw, () => `history?${new URLSearchParams({ model: name, since: Math.floor(now() - PAST_SECONDS), limit: 1000 })}`, 10);
  const events = answer.data ? answer.data.events : [], took = new Map(), moved = new Map(), starts = new Map();
  for (const event of events.filter((each) => each.seat && each.model === name)) {
    const seat = `${event.node} ${event.seat}`, start = starts.get(seat);
    starts.set(seat, event.state === "starting" ? event : undefined);
    if (start && event.state === "active") took.set(start.id, event.at - start.at);
    if (!event.op) continue;
    if (event.seconds && event.seconds.total) took.set(event.op, event.seconds.total);
    if (moves(event)) moved.set(event.op, moves(event));
  }
  const isSwitch = (event) => event.decision === "switch" || (event.state === "starting" && moves(event));
  const rows = events.filter(isSwitch).reverse().slice(0, MOST_ROWS);
  return html`<h2>Switches of the last hour</h2>${missing(answer, "Switches")}
    ${rows.length
      ? html`<div class="scroll" tabindex="0" role="region" aria-label="Switches of ${name}"><table>
        <thead><tr><th scope="col">Time</th><th scope="col">What</th><th scope="col">Why</th><th scope="col" class="number">Took</th><th scope="col">Details</th></tr></thead>
        <tbody>${repeat(rows, (event) => event.id, (event) => html`<tr><td class="number">${clock(event.at)}</td>
          <td class="text">${change(event, name, moves(event) || moved.get(event.op))}</td><td class="text">${event.reason || ""}</td>
          <td class="number">${took.has(event.op || event.id) ? seconds(took.get(event.op || event.id)) : "–"}</td><td>${eventButton(event)}</td></tr>`)}</tbody></table></div>`
      : answer.data ? html`<p class="soft">None.</p>` : nothing}`;
}

const change = (event, name, moved) => event.model === name
  ? `came to ${event.node}/${event.group}${moved ? ` ${moved}` : ""}${event.victim_model && event.victim_model !== name ? ` in the place of ${event.victim_model}` : ""}`
  : `left ${event.node}/${event.group} for ${event.model || "nothing"}`;

function requests(name, draw) {
  const answer = readRequests(draw, PAST_SECONDS, name, MOST_ROWS);
  const rows = answer.data ? answer.data.requests : [];
  return html`<h2>Requests that waited or failed</h2>${missing(answer, "Requests")}
    ${rows.length ? html`${requestTable(rows, "", false)}<p><a href=${href("requests", "", { model: name })}>All of them</a></p>`
      : answer.data ? html`<p class="soft">None in the last hour.</p>` : nothing}`;
}

// Of the first seat: all are of pods of the same kind.
function settings(row, why) {
  const seat = row.seats[0], explained = why.of(seat) || {};
  const facts = {
    Resource: seat.resource, Pod: seat.pod, Tier: seat.tier, SLO: seat.slo_seconds && seconds(seat.slo_seconds),
    "Parked by": explained.backend && `${explained.backend}${explained.demoted ? ` (${explained.demoted})` : ""}`,
    "Usual park / activation": explained.park_seconds && `${seconds(explained.park_seconds)} / ${seconds(explained.activate_seconds)}`,
    "Requests at once": seat.max_requests, VRAM: seat.vram_bytes && bytes(seat.vram_bytes), "Stays on its group": seat.fixed,
    "Answers not compared": explained.unverified,
  };
  return html`<h2>Settings</h2><dl>${Object.entries(facts).filter(([, value]) => value).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>
    <p class="soft">They are annotations of its pod.</p>`;
}

function log(row, draw) {
  const key = param("log"), seat = row.seats.find((each) => each.key === key);
  const pods = row.seats.filter((each) => each.pod).slice(0, MOST_SEATS);
  return html`<h2>Engine log</h2>
    <div class="bar">${pods.map((each) => html`<button type="button" aria-pressed=${String(each.key === key)}
      @click=${() => set({ log: each.key === key ? "" : each.key })}>${pods.length > 1 ? `${each.node}/${each.group}: ` : ""}${each.pod}</button>`)}</div>
    ${seat ? logText(seat, draw) : html`<p class="soft">${pods.length ? "A button shows the end of its log." : "No pod has one of its seats."}</p>`}`;
}

function logText(seat, draw) {
  const answer = ask(`log ${seat.key}`, draw, () => `log?${new URLSearchParams({ seat: seat.key })}`);
  if (!answer.data) return missing(answer, "Lines");
  const { command, lines } = answer.data;
  return html`${lines
    ? html`<pre tabindex="0" role="region" class="log" aria-label="Log of ${seat.pod}">${lines.length ? lines.join("\n") : "The engine has written nothing yet."}</pre>`
    : html`<p>The console cannot read this log. With your rights:</p>`}
    <p><code>${command}</code> <button type="button" @click=${() => copy(command)}>Copy</button></p>`;
}

const copy = (text) => navigator.clipboard
  ? navigator.clipboard.writeText(text).then(() => say("Copied."), () => say("The browser did not allow it."))
  : say("The browser copies only on https pages and on localhost.");
