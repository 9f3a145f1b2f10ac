// Nodes: GPUs, memory by seat, and what each seat waits for.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { button, seatButtons } from "./act.js";
import { byName, bytes, count, fits } from "./format.js";
import { json, now, store } from "./store.js";

const WHY_SECONDS = 5;
const MOST_ROWS = 100;
const MOST_NODES = 20;
const QUIET = new Set(["active", "idle"]);
const HOLDING = new Set(["starting", "active", "draining", "parking", "activating", "migrating", "quarantined"]);
let filter = "";
let all = false;
let allNodes = false;
let asked = 0;
let stages = new Map();
let memory = new Map();

export function nodesView(draw) {
  const nodes = new Map();
  const of = (name) => nodes.get(name) || nodes.set(name, { name, seats: [], gpus: [] }).get(name);
  for (const seat of store.seats.values()) of(seat.node).seats.push(seat);
  for (const gpu of store.gpus.values()) of(gpu.node).gpus.push(gpu);
  const found = [...nodes.values()].filter((node) => fits(node.name, filter));
  found.sort((a, b) => byName(a.name, b.name));
  const shown = allNodes ? found : found.slice(0, MOST_NODES);
  if (shown.length && now() - asked > WHY_SECONDS) {
    asked = now();
    askWhy(allNodes ? [] : shown.map((node) => ["node", node.name])).then(draw, () => {});
  }
  return html`<h1>Nodes</h1>
    <div class="bar"><label>Filter <input type="search" .value=${filter}
      @input=${(event) => { filter = event.target.value; draw(); }}></label><span>${count(nodes.size, "node")}</span></div>
    ${shown.length ? repeat(shown, (node) => node.name, (node) => nodeSection(node, draw)) : html`<p>No node ${filter ? "has this in its name" : "has a seat or a GPU yet"}.</p>`}
    ${found.length > shown.length
      ? html`<p><button type="button" @click=${() => { allNodes = true; draw(); }}>Show all ${found.length} nodes</button></p>`
      : nothing}`;
}

// Of these nodes, or of all.
async function askWhy(wanted) {
  const answer = await json(`why?${new URLSearchParams(wanted)}`);
  const found = new Map();
  memory = new Map(answer.nodes.map((node) => [node.node, (node.host_memory || {}).available_bytes]));
  for (const node of answer.nodes) {
    for (const group of node.groups || []) {
      for (const seat of group.seats) found.set(`${node.node} ${seat.seat}`, seat.stage);
    }
  }
  stages = found;
}

function nodeSection(node, draw) {
  node.seats.sort((a, b) => byName(a.group, b.group) || byName(a.seat, b.seat));
  node.gpus.sort((a, b) => a.index - b.index);
  const host = node.seats.reduce((total, seat) => total + (seat.state === "parked" ? seat.host || 0 : 0), 0);
  return html`<section class="node" aria-label="Node ${node.name}">
    <h2>${node.name} <span class="soft">host RAM: ${host ? bytes(host) : 0} in parked copies${memory.get(node.name) ? `, ${bytes(memory.get(node.name))} free` : ""}</span>
      ${button("nodes", node.name, "drain")} ${button("nodes", node.name, "resume")}</h2>
    ${node.gpus.length ? gpuTable(node) : nothing}
    <div class="scroll" tabindex="0" role="region" aria-label="Seats of ${node.name}"><table>
      <caption>Seats</caption>
      <thead><tr><th scope="col">Seat</th><th scope="col">Model</th><th scope="col">Group</th><th scope="col">State</th>
        <th scope="col" class="number">VRAM</th><th scope="col" class="number">Host RAM</th>
        <th scope="col">Waits for</th><th scope="col">Commands</th></tr></thead>
      <tbody>${repeat(all ? node.seats : node.seats.slice(0, MOST_ROWS), (seat) => seat.key, seatRow)}</tbody></table></div>
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
      <td class="name"><meter aria-label="VRAM of seats on GPU ${gpu.index}" min="0" max=${gpu.memory_bytes || 1} value=${used}></meter>
        ${used ? bytes(used) : 0} of ${bytes(gpu.memory_bytes)}</td>
      <td class=${gpu.healthy ? "good" : "bad"}>${gpu.healthy ? "healthy" : gpu.reason || "faulty"}</td></tr>`;
  })}</tbody></table></div>`;

// A seat's VRAM is spread over the GPUs of its group.
const usedOn = (node, gpu) => node.seats
  .filter((seat) => HOLDING.has(seat.state) && (seat.gpus || []).includes(gpu.index))
  .reduce((total, seat) => total + (seat.vram || 0) / seat.gpus.length, 0);

function seatRow(seat) {
  const stage = seat.since > asked ? null : stages.get(`${seat.node} ${seat.seat}`);  // that of an earlier state is old
  const text = stage && stage.text ? `${stage.stage}: ${stage.text}` : !stage ? seat.reason || "" : QUIET.has(stage.stage) ? "–" : stage.stage;
  return html`<tr><th scope="row" class="name">${seat.seat}</th><td class="name">${seat.model || "–"}</td><td>${seat.group}</td>
    <td>${seat.state}${seat.pinned ? ", pinned" : ""}</td>
    <td class="number">${HOLDING.has(seat.state) ? bytes(seat.vram) : "–"}</td>
    <td class="number">${seat.state === "parked" ? bytes(seat.host) : "–"}</td>
    <td class="text">${seat.blocked || seat.drained || text}</td>
    <td class="acts">${seat.model ? seatButtons(seat) : nothing}</td></tr>`;
}
