// Texts for people.

const pad = (number) => String(number).padStart(2, "0");

export function clock(at) {
  const day = new Date(at * 1000);
  return `${pad(day.getHours())}:${pad(day.getMinutes())}:${pad(day.getSeconds())}`;
}

export function seconds(value) {
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

export function bytes(value) {
  if (!value) return "–";
  if (value >= 2 ** 40) return `${(value / 2 ** 40).toFixed(1)} TiB`;
  return value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${Math.round(value / 2 ** 20)} MiB`;
}

// How long a seat has been in its state, how long that usually takes, and when it ends at the latest.
export function timing(seat, now) {
  if (!seat.since || ["active", "parked", "free"].includes(seat.state)) return "";
  const known = [];
  if (seat.usual_seconds) known.push(`usually ${seconds(seat.usual_seconds)}`);
  if (seat.deadline_at) known.push(`ends by ${clock(seat.deadline_at)}`);
  return `for ${seconds(Math.max(0, now - seat.since))}${known.length ? ` (${known.join(", ")})` : ""}`;
}

// How a seat came to a group, of an event, a block or a row; empty: its engine was started there.
export const came = ({ way, came_from: from }) => (way ? `from ${from} by ${way}` : "");
const MOVING = new Set(["migrating", "starting"]);
export const moves = (event) => (MOVING.has(event.state) || MOVING.has(event.previous) ? came(event) : "");

export const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

// A decision is called by what was decided, as `kyb events` does.
export const kind = (event) => event.decision || event.type.replace("ai.kyb.v1.", "");

export const fits = (text, filter) => text.toLowerCase().includes(filter.toLowerCase());

// Names in the order that people expect: G2 before G10.
export const byName = new Intl.Collator(undefined, { numeric: true }).compare;

const HUES = [212, 24, 150, 330, 268, 100, 2, 190, 40, 300, 236, 172];
const places = new Map();

// The colour of a model. The first twelve, by name, have hues of their own; the next ones have them darker.
export function colour(model) {
  if (!places.has(model)) places.set(model, places.size);
  const place = places.get(model) % (2 * HUES.length);
  return `hsl(${HUES[place % HUES.length]} 58% ${place < HUES.length ? 33 : 24}%)`;
}

export const colourAll = (models) => [...models].sort(byName).forEach(colour);
