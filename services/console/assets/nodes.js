// Nodes: a row each where there are many; of one, or of few, GPUs, memory by seat, and what each seat waits for.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { button, seatButtons } from "./act.js";
import { vramChart } from "./charts.js";
import { missing } from "./feedback.js";
import { byName, bytes, count, fits, timing } from "./format.js";
import { href, param, route, set } from "./route.js";
import { ask, counted, inTrouble, now, sortOf, store, SWITCHING } from "./store.js";

const MOST_ROWS = 100;
const FEW_NODES = 3;  // that are shown whole
const QUIET = new Set(["active", "idle"]);
const HOLDING = new Set(["starting", "active", "draining", "parking", "activating", "migrating", "quarantined"]);
let all = false;

const SORTS = {
  "": ["All", () => true],
  waiting: ["Requests wait", (node) => node.waiting > 0],
  switching: ["Switching", (node) => node.seats.some((seat) => SWITCHING.has(seat.state))],
  trouble: ["In trouble", (node) => node.seats.some(inTrouble) || node.gpus.some((gpu) => !gpu.healthy)],
};

function nodes() {
  const found = new Map();
  const of = (name) => found.get(name) || found.set(name, { name, seats: [], gpus: [], waiting: 0 }).get(name);
  for (const seat of store.seats.values()) of(seat.node).seats.push(seat);
  for (const gpu of store.gpus.values()) of(gpu.node).gpus.push(gpu);
  for (const [lane, line] of store.lines) {
    const node = found.get(lane.slice(0, lane.lastIndexOf("/")));
    if (node && line.length) node.waiting += line[line.length - 1][1];
  }
  return [...found.values()].sort((a, b) => byName(a.name, b.name));
}

export function nodesView(draw) {
  const { name } = route(), known = nodes();
  if (name) {
    const node = known.find((each) => each.name === name);
    const head = html`<h1><a href="#nodes">Nodes</a> / ${name}</h1>`;
    return node ? html`${head}${whole([node], draw)}` : html`${head}<p>No seat and no GPU is on a node of this name.</p>`;
  }
  const filter = param("q"), sort = Object.hasOwn(SORTS, param("state")) ? param("state") : "";
  const named = known.filter((node) => fits(node.name, filter)), found = named.filter(SORTS[sort][1]);
  return html`<h1>Nodes</h1>
    <div class="bar"><label>Filter <input type="search" .value=${filter} @input=${(event) => set({ q: event.target.value })}></label>
      <span role="group" aria-label="State">${Object.entries(SORTS).map(([key, [text, fitting]]) => html`<button type="button"
        aria-pressed=${String(key === sort)} @click=${() => set({ state: key })}>${text} ${named.filter(fitting).length}</button> `)}</span></div>
    ${found.length ? known.length > FEW_NODES ? nodeTable(found) : whole(found, draw)
      : html`<p>${filter || sort ? "No node fits." : "No node has a seat or a GPU yet."}</p>`}`;
}

const nodeTable = (found) => html`<div class="scroll" tabindex="0" role="region" aria-label="Table of nodes"><table>
  <caption>${count(found.length, "node")}</caption>
  <thead><tr><th scope="col">Node</th><th scope="col">GPUs</th><th scope="col">Seats</th><th scope="col" class="number">Waiting</th>
    <th scope="col" class="wide">VRAM of seats</th><th scope="col" class="number wide">Parked in host RAM</th><th scope="col" class="wide">Commands</th></tr></thead>
  <tbody>${repeat(found, (node) => node.name, nodeRow)}</tbody></table></div>`;

function nodeRow(node) {
  const sick = node.gpus.filter((gpu) => !gpu.healthy), troubled = node.seats.find(inTrouble);
  const memory = node.gpus.reduce((sum, gpu) => sum + (gpu.memory_bytes || 0), 0);
  const used = node.gpus.reduce((sum, gpu) => sum + usedOn(node, gpu), 0);
  return html`<tr><th scope="row" class="name"><a href=${href("nodes", node.name)}>${node.name}</a></th>
    <td class=${sick.length ? "bad" : ""}>${node.gpus.length}${sick.length ? `, ${sick.length} faulty: ${sick[0].reason || "no reason"}` : ""}</td>
    <td class="text">${counted(node.seats)}${troubled ? html`<div class="warn">${troubled.model}: ${troubled.blocked || troubled.drained || troubled.reason || troubled.state}</div>` : nothing}</td>
    <td class="number ${node.waiting ? "warn" : ""}">${node.waiting}</td>
    <td class="name wide"><meter aria-label="VRAM of seats on ${node.name}" min="0" max=${memory || 1} value=${used}></meter> ${used ? bytes(used) : 0} of ${bytes(memory)}</td>
    <td class="number wide">${copies(node) ? bytes(copies(node)) : 0}</td>
    <td class="acts wide">${button("nodes", node.name, "drain")} ${button("nodes", node.name, "resume")}</td></tr>`;
}

const copies = (node) => node.seats.reduce((total, seat) => total + (seat.state === "parked" ? seat.host_bytes || 0 : 0), 0);

function whole(shown, draw) {
  const names = shown.map((node) => node.name);
  const why = ask(`why ${names.join(" ")}`, draw, () => `why?${new URLSearchParams(names.map((name) => ["node", name]))}`);
  const stages = new Map(), memory = new Map();
  for (const node of why.data ? why.data.nodes : []) {
    memory.set(node.node, (node.host_memory || {}).available_bytes);
    for (const group of node.groups || []) {
      for (const seat of group.seats) stages.set(`${node.node} ${seat.seat}`, seat.stage);
    }
  }
  return html`${missing(why, "Reasons")}${repeat(shown, (node) => node.name,
    (node) => nodeSection(node, memory.get(node.name), (seat) => (seat.since > why.at ? null : stages.get(`${seat.node} ${seat.seat}`)), draw))}`;
}

function nodeSection(node, free, stageOf, draw) {
  node.seats.sort((a, b) => byName(a.group, b.group) || byName(a.seat, b.seat));
  node.gpus.sort((a, b) => a.index - b.index);
  const host = copies(node), until = now(), memory = node.gpus.reduce((sum, gpu) => sum + (gpu.memory_bytes || 0), 0);
  return html`<section class="node" aria-label="Node ${node.name}">
    <h2><a href=${href("nodes", node.name)}>${node.name}</a> <span class="soft">host RAM: ${host ? bytes(host) : 0} in parked copies${free ? `, ${bytes(free)} free` : ""}</span>
      ${button("nodes", node.name, "drain")} ${button("nodes", node.name, "resume")}</h2>
    ${node.gpus.length ? gpuTable(node) : nothing}
    ${vramChart(`VRAM of seats on ${node.name}`, node.seats, memory, until - 600, until)}
    <div class="scroll" tabindex="0" role="region" aria-label="Seats of ${node.name}"><table>
      <caption>Seats</caption>
      <thead><tr><th scope="col">Model</th><th scope="col">Group</th><th scope="col">State</th>
        <th scope="col" class="number wide">VRAM</th><th scope="col" class="number wide">Host RAM</th>
        <th scope="col">Waits for</th><th scope="col">Commands</th></tr></thead>
      <tbody>${repeat(all ? node.seats : node.seats.slice(0, MOST_ROWS), (seat) => seat.key, (seat) => seatRow(seat, stageOf(seat)))}</tbody></table></div>
    ${all || node.seats.length <= MOST_ROWS
      ? nothing
      : html`<p><button type="button" @click=${() => { all = true; draw(); }}>Show all ${node.seats.length} seats</button></p>`}
  </section>`;
}

const gpuTable = (node) => html`<div class="scroll" tabindex="0" role="region" aria-label="GPUs of ${node.name}"><table>
  <caption>GPUs</caption>
  <thead><tr><th scope="col">GPU</th><th scope="col">Kind</th><th scope="col">Groups</th><th scope="col">VRAM of seats</th>
    <th scope="col">Health</th></tr></thead>
  <tbody>${node.gpus.map((gpu) => {
    const used = usedOn(node, gpu);
    return html`<tr><th scope="row">${gpu.index}</th><td>${gpu.name}</td><td>${gpu.groups.join(", ")}</td>
      <td class="name"><meter aria-label="VRAM of seats on GPU ${gpu.index} of ${node.name}" min="0" max=${gpu.memory_bytes || 1} value=${used}></meter>
        ${used ? bytes(used) : 0} of ${bytes(gpu.memory_bytes)}</td>
      <td class=${gpu.healthy ? "good" : "bad"}>${gpu.healthy ? "healthy" : gpu.reason || "faulty"}</td></tr>`;
  })}</tbody></table></div>`;

// A seat's VRAM is spread over the GPUs of its group.
const usedOn = (node, gpu) => node.seats
  .filter((seat) => HOLDING.has(seat.state) && (seat.gpus || []).includes(gpu.index))
  .reduce((total, seat) => total + (seat.vram_bytes || 0) / seat.gpus.length, 0);

export const placed = (seat) => `${seat.group}${seat.way && seat.home_group !== seat.group ? ` (home ${seat.home_group}, moved by ${seat.way})` : ""}`;

// ``stage``: what its manager says that it waits for; that of an earlier state is not given.
function seatRow(seat, stage) {
  const text = stage && stage.text ? `${stage.stage}: ${stage.text}` : !stage ? seat.reason || "" : QUIET.has(stage.stage) ? "–" : stage.stage;
  const late = stage && stage.clock && stage.clock.late;
  return html`<tr><th scope="row" class="name">${seat.model ? html`<a href=${href("models", seat.model)}>${seat.model}</a>` : seat.seat}</th>
    <td>${placed(seat)}</td>
    <td class=${late || sortOf(seat) === "in trouble" ? "bad" : ""}>${seat.state}${seat.pinned ? ", pinned" : ""} <span class="soft">${timing(seat, now())}</span>${late ? " – later than usual" : ""}</td>
    <td class="number wide">${HOLDING.has(seat.state) ? bytes(seat.vram_bytes) : "–"}</td>
    <td class="number wide">${seat.state === "parked" ? bytes(seat.host_bytes) : "–"}</td>
    <td class="text">${seat.blocked || seat.drained || text}</td>
    <td class="acts">${seat.model ? seatButtons(seat) : nothing}</td></tr>`;
}
