// Plan: how many GPUs the requests of the last hours need, as the simulator answers.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { say } from "./feedback.js";
import { json, now } from "./store.js";

const LOOK_SECONDS = 2;
let state = { requests: 0, hours: 0, running: false, progress: "", made_at: null };
let looked = 0;

export function planView(draw) {
  if (now() - looked > LOOK_SECONDS) look(draw);
  return html`<h1>Plan</h1>
    <p>How many groups of GPUs do the last hours need, with and without seats that share GPUs? The simulator plays the requests that
      this router served: ${state.requests} in the last ${state.hours} h.</p>
    <form @submit=${(event) => { event.preventDefault(); start(event.target, draw); }}>
      <div class="bar">
        <label>Longest wait <input name="seconds" type="number" min="0.1" step="any" value="20" required> s</label>
        <label>for <input name="share" type="number" min="1" max="100" step="any" value="95" required> % of requests</label>
        <button ?disabled=${state.running || !state.requests}>Make a plan</button>
      </div>
    </form>
    <p role="status">${state.running ? state.progress || "The simulator starts." : state.progress}</p>
    ${state.made_at
      ? html`<iframe class="plan" title="The plan: a table of layouts, and plots" sandbox src="plan/report?${state.made_at}"></iframe>`
      : nothing}`;
}

// Asks again while the view is shown or a plan is being made.
async function look(draw) {
  looked = now();
  try {
    state = await json("plan");
  } catch (error) {
    say(error.message);
  }
  draw();
  if (state.running) setTimeout(draw, 1000 * LOOK_SECONDS + 100);
}

async function start(form, draw) {
  const goal = { seconds: Number(form.elements.seconds.value), share: Number(form.elements.share.value) / 100 };
  try {
    await json("plan", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(goal) });
  } catch (error) {
    say(error.message);
  }
  await look(draw);
}
