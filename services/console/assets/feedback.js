// Results for a moment, and a dialog with details.

import { html, render } from "./vendor/lit-html/lit-html.js";

const byId = (id) => document.getElementById(id);
let timer = 0;

// Shows a result for some seconds; screen readers read it.
export function say(text) {
  byId("status").textContent = text;
  clearTimeout(timer);
  timer = setTimeout(() => (byId("status").textContent = ""), 8000);
}

export function showDetails(content) {
  render(html`${content}<form method="dialog"><button autofocus>Close</button></form>`, byId("details"));
  byId("details").showModal();
}
