// Timeline: a lane per group, blocks coloured by model, waiting requests as a line below.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { eventButton } from "./events.js";
import { say } from "./feedback.js";
import { byName, came, clock, colour, fits, kind, seconds } from "./format.js";
import { askPast, readPast } from "./past.js";
import { href, open, param, set } from "./route.js";
import { now, store, SWITCHING } from "./store.js";

const WINDOWS = [["10 min", 600], ["1 h", 3600], ["6 h", 21600], ["24 h", 86400]];
const LONGEST = 86400, SHORTEST = 10;
const ROW = 18, LINE = 22;
const MANY = 30;  // lanes from which on those that wait or switch come first
const HATCHED = new Set(["activating", "parking", "migrating", "starting"]);

const view = { seconds: 600, end: 0 };  // end 0: now
const selected = new Map();  // lane -> block
const visible = new Set();
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) (entry.isIntersecting ? visible.add(entry.target) : visible.delete(entry.target));
  drawTimeline();
});
const watched = new WeakSet();
const range = () => {
  const until = view.end || now();
  return [until - view.seconds, until];
};

const SORTS = {
  "": ["All groups", () => true],
  waiting: ["Requests wait", (name) => waitingAt(name) > 0],
  switching: ["Switching", (name) => holders(name).some((block) => SWITCHING.has(block.state))],
  free: ["Free", (name) => !holders(name).length],
};

export function timelineView(draw) {
  view.seconds = Math.min(LONGEST, Math.max(SHORTEST, Number(param("seconds")) || 600));
  view.end = Number(param("end")) || 0;
  readPast(Math.max(range()[0], now() - LONGEST), draw);
  const filter = param("q"), [, fitting] = SORTS[Object.hasOwn(SORTS, param("groups")) ? param("groups") : ""];
  const lanes = laneNames().filter((name) => fitting(name) && (fits(name, filter) || modelsOf(name).some((model) => fits(model, filter))));
  if (lanes.length > MANY) lanes.sort((a, b) => busy(b) - busy(a));  // stable: by name among equals
  return html`<h1>Timeline</h1>
    <div class="bar" role="group" aria-label="Window">
      ${WINDOWS.map(([text, length]) => html`<button type="button" aria-pressed=${String(view.seconds === length)}
        @click=${() => show(length, 0)}>${text}</button>`)}
      <button type="button" aria-label="Earlier" @click=${() => pan(-0.5)}>◀</button>
      <button type="button" aria-label="Later" @click=${() => pan(0.5)}>▶</button>
      <button type="button" aria-label="Zoom in" @click=${() => zoom(0.5)}>+</button>
      <button type="button" aria-label="Zoom out" @click=${() => zoom(2)}>−</button>
      <button type="button" aria-pressed=${String(view.end === 0)} @click=${() => show(view.seconds, 0)}>Now</button>
      <label>Filter <input type="search" placeholder="node, group, model" .value=${filter} @input=${(event) => set({ q: event.target.value })}></label>
      <label>Show <select @change=${(event) => set({ groups: event.target.value })}>${Object.entries(SORTS).map(
        ([name, [text]]) => html`<option value=${name} ?selected=${name === param("groups")}>${text}</option>`)}</select></label>
    </div>
    <p class="soft">Hatched: starting, activating or parking. Lighter: draining. Arrow keys select a block of a lane,
      Enter opens it; drag to pan, Ctrl and the wheel to zoom.</p>
    <canvas class="axis" id="axis" aria-hidden="true"></canvas>
    ${lanes.length ? repeat(lanes, (name) => name, lane) : html`<p>${filter || param("groups") ? "No group fits." : "No seat holds a group yet."}</p>`}`;
}

const busy = (name) => Number(SORTS.waiting[1](name) || SORTS.switching[1](name));

function laneNames() {
  const names = new Set(store.lanes.keys());
  for (const seat of store.seats.values()) names.add(`${seat.node}/${seat.group}`);
  return [...names].sort(byName);
}

const blocksOf = (name) => store.lanes.get(name) || [];
const holders = (name) => blocksOf(name).filter((block) => block.until === undefined);
const modelsOf = (name) => [...new Set(blocksOf(name).map((block) => block.model || ""))];

function waitingAt(name) {
  const line = store.lines.get(name) || [];
  return line.length ? line[line.length - 1][1] : 0;
}

function lane(name) {
  const waiting = waitingAt(name);
  const text = holders(name).map((block) => `${block.model} ${block.state}`).join(", ") || "free";
  return html`<section class="lane" aria-label="Group ${name}">
    <h2>${name} <span title=${text}>${text}</span> ${waiting ? html`<span class="warn">${waiting} waiting</span>` : nothing}</h2>
    <button type="button" class="plot" data-lane=${name} aria-label="Timeline of ${name}: ${text}, ${waiting} waiting"
      @keydown=${(event) => keydown(event, name)} @click=${(event) => click(event, name)}
      @pointerdown=${drag} @wheel=${wheel}><canvas data-lane=${name} aria-hidden="true"></canvas></button></section>`;
}

// --- the window ---

function show(length, end) {
  view.seconds = Math.min(LONGEST, Math.max(SHORTEST, Math.round(length)));
  view.end = end && end < now() ? end : 0;
  askPast();
  set({ seconds: view.seconds === 600 ? "" : String(view.seconds), end: view.end ? view.end.toFixed(1) : "" });
}

const pan = (share) => show(view.seconds, range()[1] + share * view.seconds);
const zoom = (factor) => show(view.seconds * factor, view.end && range()[1] + (view.seconds * (factor - 1)) / 2);

function wheel(event) {
  if (!event.ctrlKey) return;
  event.preventDefault();
  zoom(event.deltaY > 0 ? 1.25 : 0.8);
}

let dragged = false;

function drag(event) {
  const plot = event.currentTarget, x = event.clientX, end = range()[1];
  dragged = false;
  const move = (moved) => {
    if (!dragged && Math.abs(moved.clientX - x) < 4) return;
    dragged = true;
    show(view.seconds, end - ((moved.clientX - x) / plot.clientWidth) * view.seconds);
  };
  window.addEventListener("pointermove", move);
  window.addEventListener("pointerup", () => window.removeEventListener("pointermove", move), { once: true });
}

// --- selecting ---

function shownBlocks(name) {
  const [from, until] = range();
  return (store.lanes.get(name) || [])
    .filter((block) => block.since <= until && (block.until || now()) >= from)
    .sort((a, b) => a.since - b.since);
}

function keydown(event, name) {
  if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  event.preventDefault();
  const blocks = shownBlocks(name), at = blocks.indexOf(selected.get(name));
  const next = at < 0 ? blocks.length - 1 : at + (event.key === "ArrowRight" ? 1 : -1);
  const block = blocks[Math.max(0, Math.min(blocks.length - 1, next))];
  if (!block) return;
  selected.set(name, block);
  say(describe(block));
  drawTimeline();
}

function click(event, name) {
  if (dragged) {
    dragged = false;
    return;
  }
  const box = event.currentTarget.getBoundingClientRect(), [from] = range();
  let block = selected.get(name);
  if (event.detail > 0) {  // a pointer; the keyboard opens what is selected
    const at = from + ((event.clientX - box.left) / box.width) * view.seconds;
    const row = Math.floor((event.clientY - box.top) / ROW);
    const slack = (view.seconds / box.width) * 3;
    const hits = shownBlocks(name).filter((each) => each.since - slack <= at && (each.until || now()) + slack >= at);
    block = hits.find((each) => each.row === row) || hits[0];
  }
  if (!block) return;
  selected.set(name, block);
  drawTimeline();
  open({ block: JSON.stringify([name, block.seat, block.since]) });
}

const describe = (block) => `${block.model || block.seat} ${block.state} from ${clock(block.since)} for ` +
  seconds((block.until || now()) - block.since) + (block.reason ? `: ${block.reason}` : "");

export function blockDialog(value, draw) {
  let found;
  try {
    const [lane, seat, since] = JSON.parse(value);
    readPast(Math.max(since - 1, now() - LONGEST), draw);
    found = blocksOf(lane).find((block) => block.seat === seat && Math.abs(block.since - since) < 0.001);
  } catch {
    found = undefined;
  }
  return found ? details(found) : html`<h2>Not found</h2><p>This part of the timeline is not known: the timeline reaches a day back.</p>`;
}

function details(block) {
  const related = store.events.filter(
    (event) => (block.op && event.op === block.op) || (block.cause && event.cause === block.cause),
  ).slice(-30);
  const phases = Object.entries(block.seconds || {});
  return html`<h2>${block.model ? html`<a href=${href("models", block.model)}>${block.model}</a>` : block.seat}: ${block.state}</h2>
    <dl><dt>Seat</dt><dd>${block.seat} on ${block.lane}</dd>
      <dt>From, until</dt><dd>${clock(block.since)} – ${block.until ? clock(block.until) : "now"}
        (${seconds((block.until || now()) - block.since)})</dd>
      ${came(block) ? html`<dt>Came here</dt><dd>${came(block)}</dd>` : nothing}
      <dt>Reason</dt><dd>${block.reason || "–"}</dd>
      <dt>Cause</dt><dd>${block.cause || "–"}</dd>
      <dt>Operation</dt><dd>${block.op || "–"}</dd></dl>
    ${phases.length
      ? html`<table><caption>Phases of the switch</caption><thead><tr><th scope="col">Phase</th>
          <th scope="col" class="number">Time</th></tr></thead>
          <tbody>${phases.map(([name, value]) => html`<tr><th scope="row">${name}</th><td class="number">${seconds(value)}</td></tr>`)}</tbody></table>`
      : nothing}
    ${related.length
      ? html`<h2>Events with this cause</h2><ul>${related.map((event) => html`<li>${clock(event.at)} ${kind(event)}
          ${event.seat || ""} ${event.reason || ""}
          ${eventButton(event)}</li>`)}</ul>`
      : nothing}`;
}

// --- drawing ---

export function drawTimeline() {
  for (const canvas of document.querySelectorAll("canvas[data-lane]")) {
    if (!watched.has(canvas)) {
      watched.add(canvas);
      watcher.observe(canvas);
    }
  }
  const style = getComputedStyle(document.documentElement);
  const ink = { soft: style.getPropertyValue("--soft"), line: style.getPropertyValue("--line"),
    warn: style.getPropertyValue("--warn"), text: style.getPropertyValue("--text") };
  for (const canvas of visible) if (canvas.isConnected) drawLane(canvas, ink);
  const axis = document.getElementById("axis");
  if (axis) drawAxis(axis, ink);
}

function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  pen.textBaseline = "middle";
  return [pen, width];
}

// Each seat keeps the row that it has while others hold the group beside it.
function rowsOf(blocks) {
  const free = [], rows = new Map();
  for (const block of blocks) {
    let row = rows.get(block.seat);
    if (row === undefined || free[row] > block.since + 1e-6) {
      row = free.findIndex((until) => until <= block.since + 1e-6);
      if (row < 0) row = free.length;
    }
    rows.set(block.seat, row);
    free[row] = block.until || Infinity;
    block.row = row;
  }
  return Math.max(1, free.length);
}

function drawLane(canvas, ink) {
  const name = canvas.dataset.lane, [from, until] = range();
  const blocks = shownBlocks(name), rows = rowsOf(blocks);
  const [pen, width] = prepare(canvas, rows * ROW + LINE);
  const x = (at) => ((at - from) / (until - from)) * width;
  for (const block of blocks) {
    const left = Math.max(0, x(block.since)), right = Math.min(width, x(block.until || until));
    drawBlock(pen, block, left, Math.max(1, right - left), block.row * ROW, selected.get(name) === block, ink);
  }
  drawWaiting(pen, store.lines.get(name) || [], x, until, rows * ROW, width, ink);
}

function drawBlock(pen, block, left, width, top, chosen, ink) {
  pen.globalAlpha = block.state === "draining" ? 0.6 : 1;
  pen.fillStyle = colour(block.model || block.seat);
  pen.fillRect(left, top + 1, width, ROW - 2);
  pen.globalAlpha = 1;
  if (HATCHED.has(block.state)) hatch(pen, left, top + 1, width, ROW - 2);
  if (["quarantined", "lost", "releasing"].includes(block.state)) outline(pen, left, top, width, "#ff4d4d");
  if (chosen) outline(pen, left, top, width, ink.text);
  if (width > 40 && !HATCHED.has(block.state)) {
    pen.save();
    pen.beginPath();
    pen.rect(left, top, width - 3, ROW);
    pen.clip();
    pen.fillStyle = "#fff";
    pen.fillText(block.model || block.seat, left + 4, top + ROW / 2 + 0.5);
    pen.restore();
  }
}

function hatch(pen, left, top, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(left, top, width, height);
  pen.clip();
  pen.strokeStyle = "rgba(255,255,255,.65)";
  pen.beginPath();
  for (let at = left - height; at < left + width; at += 6) {
    pen.moveTo(at, top + height);
    pen.lineTo(at + height, top);
  }
  pen.stroke();
  pen.restore();
}

function outline(pen, left, top, width, style) {
  pen.strokeStyle = style;
  pen.lineWidth = 2;
  pen.strokeRect(left + 1, top + 2, Math.max(1, width - 2), ROW - 4);
  pen.lineWidth = 1;
}

function drawWaiting(pen, line, x, until, top, width, ink) {
  const most = Math.max(1, ...line.map(([, count]) => count));
  const y = (count) => top + LINE - 2 - (count / most) * (LINE - 8);
  pen.strokeStyle = ink.line;
  pen.beginPath();
  pen.moveTo(0, y(0));
  pen.lineTo(width, y(0));
  pen.stroke();
  if (!line.length) return;
  pen.strokeStyle = ink.warn;
  pen.lineWidth = 1.5;
  pen.beginPath();
  let last = 0;
  pen.moveTo(x(line[0][0]), y(0));
  for (const [at, count] of line) {
    pen.lineTo(x(at), y(last));
    pen.lineTo(x(at), y(count));
    last = count;
  }
  pen.lineTo(x(until), y(last));
  pen.stroke();
  pen.lineWidth = 1;
  pen.fillStyle = ink.soft;
  if (most > 1) pen.fillText(`${most}`, 2, top + 7);
}

const STEPS = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400];

function drawAxis(canvas, ink) {
  const [pen, width] = prepare(canvas, 20), [from, until] = range();
  const step = STEPS.find((each) => ((until - from) / each) * 70 < width) || 14400;
  pen.fillStyle = ink.soft;
  for (let at = Math.ceil(from / step) * step; at < until; at += step) {
    const x = ((at - from) / (until - from)) * width;
    pen.fillRect(x, 14, 1, 6);
    if (x + 58 < width) pen.fillText(clock(at), x + 3, 9);
  }
}
