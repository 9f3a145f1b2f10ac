// What the page knows: the router's state, kept up to date by its stream of changes. Times are unix seconds.

import { byName, colourAll } from "./format.js";

const HOLDING = new Set(["starting", "active", "draining", "parking", "activating", "migrating", "lost", "quarantined"]);
const RETRY_MS = 2000;
const SILENCE_MS = 15000;  // a console sends each second
const LONGEST_SILENCE_MS = 120000;
const MOST_EVENTS = 5000;
const MOST_BLOCKS = 20000;

export const store = {
  connected: false, keys: false, skew: 0, troubles: {}, problems: null,
  seats: new Map(), gpus: new Map(), loads: {}, switches: {},
  events: [], since: 0, revision: 0,
  lanes: new Map(),  // "node/group" -> [block]
  lines: new Map(),  // "node/group" -> [[time, waiting]]
};
const open = new Map();  // "node seat" -> block without an end
const reasons = new Map();  // operation -> why it was begun

export const now = () => Date.now() / 1000 + store.skew;

// Takes the state that a connection begins with.
function begin(state) {
  store.skew = state.at - Date.now() / 1000;
  store.keys = state.keys;
  store.troubles = state.troubles;
  store.problems = state.problems;
  store.seats = byKey(state.seats);
  store.gpus = byKey(state.gpus);
  store.loads = state.loads;
  store.events = state.events;
  store.revision = state.revision;
  store.since = state.since;
  store.switches = Object.fromEntries(state.switches);
  store.lines = new Map(Object.entries(state.lines));
  store.lanes = new Map();
  open.clear();
  colourAll(new Set(state.seats.map((seat) => seat.model || seat.seat)));
  for (const block of state.blocks) keep(block);
}

const byKey = (rows) => new Map(rows.map((row) => [row.key, row]));

// Adds what was before. It has ended: only changes tell what is now, whichever router answers here.
export async function loadPast(from) {
  const past = await json(`timeline?seconds=${Math.ceil(now() - from)}`);
  const known = [...store.lanes.values()].flat();
  store.lanes = new Map();
  for (const block of [...past.blocks.filter((each) => each.until < store.since), ...known]) keep(block);
  for (const [lane, line] of Object.entries(past.lines)) {
    const ours = store.lines.get(lane) || [];
    store.lines.set(lane, [...line.filter(([at]) => !ours.length || at < ours[0][0]), ...ours]);
  }
  store.switches = { ...Object.fromEntries(past.switches), ...store.switches };
  store.since = Math.min(store.since, past.since);
}

function keep(block) {
  if (!store.lanes.has(block.lane)) store.lanes.set(block.lane, []);
  const lane = store.lanes.get(block.lane);
  lane.push(block);
  if (lane.length > MOST_BLOCKS) lane.splice(0, 1000);
  if (block.until === undefined) open.set(seatId(block.lane.slice(0, block.lane.lastIndexOf("/")), block.seat), block);
}

const seatId = (node, seat) => `${node} ${seat}`;

function take(change) {
  store.skew = change.at - Date.now() / 1000;
  for (const seat of change.seats) store.seats.set(seat.key, seat);
  for (const key of change.gone) store.seats.delete(key);
  for (const [key, gpu] of Object.entries(change.gpus)) gpu ? store.gpus.set(key, gpu) : store.gpus.delete(key);
  store.loads = change.loads;
  store.troubles = change.troubles;
  if ("problems" in change) store.problems = change.problems;
  for (const [lane, count] of Object.entries(change.lanes)) {
    if (!store.lines.has(lane)) store.lines.set(lane, []);
    const line = store.lines.get(lane);
    if (!line.length || line[line.length - 1][0] < change.at) line.push([change.at, count]);
  }
  // The first changes after the state may repeat events that are in it.
  const seen = change.events.length - (change.revision - store.revision);
  for (const event of change.events.slice(Math.max(0, seen))) takeEvent(event);
  store.revision = Math.max(store.revision, change.revision);
  if (store.events.length > MOST_EVENTS) store.events = store.events.slice(-MOST_EVENTS);
}

function takeEvent(event) {
  store.events.push(event);
  if (event.op && event.reason) reasons.set(event.op, event.reason);
  if (!event.seat || !event.state) return;
  if (reasons.size > 1000) reasons.delete(reasons.keys().next().value);
  event.reason = event.reason || reasons.get(event.op);
  const id = seatId(event.node, event.seat), lane = `${event.node}/${event.group || ""}`, block = open.get(id);
  const came = ["activating", "migrating"].includes(event.previous) || (event.previous === "starting" && event.way);
  if (event.type.endsWith("seat-activated") && came) {
    const before = block || { since: event.at }, { at, reason = before.reason || "", cause, seconds = {} } = event;
    store.switches[event.model] = { at, reason, cause, seconds: seconds.total || at - before.since };
  }
  if (block && block.state === event.state && block.lane === lane) return;
  if (block) {
    block.until = Math.max(event.at, block.since);
    open.delete(id);
  }
  if (HOLDING.has(event.state) || (event.state === "releasing" && block)) {
    const { seat, model = "", state, at, reason, cause, op, seconds, way, came_from } = event;
    keep({ lane, seat, model, state, since: at, reason, cause, op, seconds, way, came_from });
  }
}

// Calls changed() after each change, until the page is closed. Each connection begins with the whole state of the router
// that answers it: what happened while there was none is in it. A large state may take longer on a busy machine, so each
// stream in a row of which nothing came is waited for twice as long as the one before.
export function follow(changed, patience = SILENCE_MS) {
  const source = new EventSource("live");
  const again = () => {
    source.close();
    clearTimeout(silence);
    store.connected = false;
    setTimeout(() => follow(changed, Math.min(LONGEST_SILENCE_MS, next)), RETRY_MS);
    changed();
  };
  let next = 2 * patience, silence = setTimeout(again, patience);
  const hear = (take) => (message) => {
    take(JSON.parse(message.data));
    store.connected = true;
    clearTimeout(silence);
    next = SILENCE_MS;
    silence = setTimeout(again, SILENCE_MS);
    changed();
  };
  source.addEventListener("state", hear(begin));
  source.onmessage = hear(take);
  source.onerror = again;
}

// --- requests ---

export const key = () => sessionStorage.getItem("key") || "";
export const authorization = () => (key() ? { Authorization: `Bearer ${key()}` } : {});

export async function json(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: { ...authorization(), ...options.headers } });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ? body.error.message : answer.statusText);
  return body;
}

const asked = new Map();
const MOST_ASKED = 50;

// What a view reads beside the stream, at most every so many seconds while it is drawn: {data, error, at}.
export function ask(name, draw, path, every = 5) {
  const answer = asked.get(name) || { data: null, error: "", at: 0, busy: false };
  asked.delete(name);
  asked.set(name, answer);
  if (asked.size > MOST_ASKED) asked.delete(asked.keys().next().value);
  if (!answer.busy && now() - answer.at > every) {
    answer.busy = true;
    answer.at = now();
    json(path())
      .then((data) => Object.assign(answer, { data, error: "" }), (error) => (answer.error = error.message))
      .finally(() => {
        answer.busy = false;
        draw();
      });
  }
  return answer;
}

export const askAgain = () => asked.clear();

export const command = (kind, name, verb) =>
  json(`${kind}/${encodeURIComponent(name)}/${verb}`, { method: "POST" });

// --- what several views compute ---

const RANK = ["active", "draining", "migrating", "activating", "starting", "parking", "parked", "waiting", "backoff"];

// States of seats as people sort them.
export const SWITCHING = new Set(["starting", "draining", "parking", "activating", "migrating", "releasing"]);
export const TROUBLED = new Set(["quarantined", "lost", "backoff"]);
export const inTrouble = (seat) => TROUBLED.has(seat.state) || Boolean(seat.blocked || seat.drained);
export const sortOf = (seat) => inTrouble(seat) ? "in trouble" : SWITCHING.has(seat.state) ? "switching"
  : seat.state === "active" ? "active" : "parked";

// "3 active, 17 parked".
export function counted(seats) {
  const found = {};
  for (const seat of seats) if (seat.state !== "free") found[sortOf(seat)] = (found[sortOf(seat)] || 0) + 1;
  return ["active", "switching", "parked", "in trouble"].filter((name) => found[name]).map((name) => `${found[name]} ${name}`).join(", ");
}

// One row per model: its seats, best state and load.
export function models() {
  const found = new Map();
  for (const seat of store.seats.values()) {
    if (!seat.model || seat.state === "free") continue;
    const row = found.get(seat.model) || { model: seat.model, seats: [], slo: 0 };
    row.seats.push(seat);
    row.slo = row.slo ? Math.min(row.slo, seat.slo_seconds || row.slo) : seat.slo_seconds || 0;
    found.set(seat.model, row);
  }
  for (const row of found.values()) {
    row.seats.sort((a, b) => byName(a.seat, b.seat));
    const ranks = row.seats.map((seat) => RANK.indexOf(seat.state)).filter((rank) => rank >= 0);
    row.state = ranks.length ? RANK[Math.min(...ranks)] : row.seats[0].state;
    [row.waiting, row.inFlight, row.oldest] = store.loads[row.model] || [0, 0, 0];
    row.last = store.switches[row.model];
  }
  return [...found.values()];
}
