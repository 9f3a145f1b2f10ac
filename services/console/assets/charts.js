// Charts: waiting requests, GPUs and VRAM over time, from the same blocks as the timeline.

import { html } from "./vendor/lit-html/lit-html.js";
import { chart } from "./chart.js";
import { bytes, colour } from "./format.js";
import { askPast, readPast } from "./past.js";
import { param, set } from "./route.js";
import { now, store, SWITCHING } from "./store.js";

const WINDOWS = [["10 min", ""], ["1 h", "3600"], ["6 h", "21600"], ["24 h", "86400"]];
const POINTS = 150;
const FRESH_SECONDS = 2;  // many blocks take some milliseconds
const INK = { active: "#2f7d4f", switching: "#c9822b", other: "#5a6b7d", waiting: "#b5541c" };
let kept = { name: "", at: 0, drawn: "" };

export function chartsView(draw) {
  const length = Number(param("seconds")) || 600, until = now(), from = until - length;
  readPast(from, draw);
  if (kept.name !== `${length} ${store.since}` || until - kept.at > FRESH_SECONDS) kept = { name: `${length} ${store.since}`, at: until, drawn: draws(from, until) };
  return html`<h1>Charts</h1>
    <div class="bar" role="group" aria-label="Window">${WINDOWS.map(([text, value]) => html`<button type="button"
      aria-pressed=${String(length === (Number(value) || 600))} @click=${() => { askPast(); set({ seconds: value }); }}>${text}</button>`)}</div>
    ${kept.drawn}
    <p class="soft">GPUs and VRAM are those of seats, as their events say; waiting requests are known since the console started.
      Tokens, what GPUs compute, and longer times, are in Prometheus and Grafana.</p>`;
}

function draws(from, until) {
  const gpus = [...store.gpus.values()], total = gpus.reduce((sum, gpu) => sum + (gpu.memory_bytes || 0), 0);
  const held = heldGpus(gpus, from, until);
  return html`${chart({ title: "Requests that wait", series: [{ name: "waiting", colour: INK.waiting, values: waiting(from, until) }], from, until, show: (value) => String(Math.round(value)) })}
    ${gpus.length
      ? chart({ title: "GPUs in use", series: [{ name: "active", colour: INK.active, values: held.active }, { name: "switching", colour: INK.switching, values: held.switching }],
        from, until, most: gpus.length, show: (value) => String(Math.round(value)) })
      : html`<p>No GPU is known yet.</p>`}
    ${vramChart("VRAM of seats", [...store.seats.values()], total, from, until)}`;
}

// VRAM of these seats while they held a group, the largest models named.
export function vramChart(title, seats, most, from, until) {
  const found = new Map(), byId = new Map(seats.filter((seat) => seat.vram_bytes).map((seat) => [`${seat.node} ${seat.seat}`, seat]));
  for (const [lane, blocks] of store.lanes) {
    for (const block of blocks) {
      const seat = byId.get(`${lane.slice(0, lane.lastIndexOf("/"))} ${block.seat}`);
      if (!seat) continue;
      if (!found.has(seat.model)) found.set(seat.model, new Array(POINTS).fill(0));
      fill(block, from, until, (at) => (found.get(seat.model)[at] += seat.vram_bytes));
    }
  }
  const ranked = [...found].map(([name, values]) => ({ name, values, colour: colour(name), sum: values.reduce((sum, value) => sum + value, 0) }))
    .filter((each) => each.sum).sort((a, b) => b.sum - a.sum);
  const first = ranked.slice(0, 6), rest = ranked.slice(6);
  if (rest.length) first.push({ name: `${rest.length} more`, colour: INK.other, values: first[0].values.map((_, at) => rest.reduce((sum, each) => sum + each.values[at], 0)) });
  return chart({ title, series: first, from, until, most, show: (value) => (value ? bytes(value) : "0") });
}

const points = (from, until) => Array.from({ length: POINTS }, (_, at) => from + ((until - from) * at) / (POINTS - 1));

// Calls mark(point) for each point of the window in which the block was.
function fill(block, from, until, mark) {
  const place = (at) => ((at - from) / (until - from)) * (POINTS - 1);
  const first = Math.max(0, Math.ceil(place(block.since))), last = Math.min(POINTS - 1, block.until === undefined ? POINTS - 1 : Math.floor(place(block.until)));
  for (let at = first; at <= last; at += 1) mark(at);
}

function waiting(from, until) {
  const sums = new Array(POINTS).fill(0), at = points(from, until);
  for (const line of store.lines.values()) {
    let next = 0;
    for (let point = 0; point < POINTS; point += 1) {
      while (next < line.length && line[next][0] <= at[point]) next += 1;
      if (next) sums[point] += line[next - 1][1];
    }
  }
  return sums;
}

// GPUs by what holds them at each point: an active seat first.
function heldGpus(gpus, from, until) {
  const places = new Map();
  gpus.forEach((gpu, place) => {
    for (const group of gpu.groups) places.set(`${gpu.node}/${group}`, [...(places.get(`${gpu.node}/${group}`) || []), place]);
  });
  const active = points(from, until).map(() => new Set()), switching = active.map(() => new Set());
  for (const [lane, blocks] of store.lanes) {
    const of = places.get(lane) || [];
    for (const block of blocks) {
      const sets = block.state === "active" ? active : SWITCHING.has(block.state) ? switching : null;
      if (sets) fill(block, from, until, (at) => of.forEach((place) => sets[at].add(place)));
    }
  }
  return {
    active: active.map((set) => set.size),
    switching: switching.map((set, at) => [...set].filter((place) => !active[at].has(place)).length),
  };
}
