// Buttons that send a command.

import { html } from "./vendor/lit-html/lit-html.js";
import { say } from "./feedback.js";
import { command } from "./store.js";

async function send(kind, name, verb, label) {
  if (verb === "drain" && !confirm(`Drain ${label}? All its seats are parked, and none is activated there until it is resumed.`)) return;
  say(`${verb} ${label} …`);
  try {
    const reply = await command(kind, name, verb);
    say(reply.operation ? `${verb} ${label}: ${reply.operation.text}` : `${verb} ${label}: accepted`);
  } catch (error) {
    say(`${verb} ${label}: ${error.message}`);
  }
}

export const button = (kind, name, verb, label = name) => html`<button type="button"
  aria-label="${verb} ${label}" @click=${() => send(kind, name, verb, label)}>${verb}</button>`;

export const seatButtons = (seat) => {
  const name = `seat/${seat.seat}`, label = `${seat.model} (${seat.seat})`;
  return html`${button("seats", name, seat.state === "active" ? "park" : "activate", label)}
    ${button("seats", name, seat.pinned ? "unpin" : "pin", label)}`;
};
