// Results for a moment, and what a view shows while it has nothing to show.

import { html, nothing } from "./vendor/lit-html/lit-html.js";

const byId = (id) => document.getElementById(id);
let timer = 0;

// Shows a result for some seconds; screen readers read it.
export function say(text) {
  byId("status").textContent = text;
  clearTimeout(timer);
  timer = setTimeout(() => (byId("status").textContent = ""), 8000);
}

// Of an answer of ask(): that it is being read, or why it cannot be; nothing once it is there.
export function missing(answer, what) {
  if (answer.error) return html`<p class="bad" role="status">${what} cannot be read: ${answer.error}</p>`;
  return answer.data ? nothing : html`<p class="soft" role="status">${what} are being read.</p>`;
}
