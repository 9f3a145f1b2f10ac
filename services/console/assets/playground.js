// Playground: one chat request, and the phases that it goes through.

import { html } from "./vendor/lit-html/lit-html.js";
import { kind, seconds } from "./format.js";
import { authorization, models, now, store } from "./store.js";

const PHASES = {
  "seat-closed": "the victim drains",
  "seat-evicted": "the victim is parked",
  "seat-parked": "the victim's VRAM is free",
  "seat-leased": "the seat is activated",
  "seat-moved": "the seat is activated on another group",
  "seat-activated": "the seat is active",
};
const run = { cause: "", began: 0, steps: [], text: "", abort: null };

export function playgroundView(draw) {
  const names = models().map((row) => row.model).sort();
  return html`<h1>Playground</h1>
    <form @submit=${(event) => { event.preventDefault(); send(event.target, draw); }}>
      <div class="bar">
        <label>Model <select name="model" required>${names.map((name) => html`<option>${name}</option>`)}</select></label>
        <label>Most tokens <input name="tokens" type="number" min="1" max="4096" value="64"></label>
        ${run.abort
          ? html`<button type="button" @click=${() => run.abort.abort()}>Stop</button>`
          : html`<button ?disabled=${names.length === 0}>Send</button>`}
      </div>
      <label for="prompt">Message</label>
      <textarea id="prompt" name="prompt" rows="3">Hello</textarea>
    </form>
    <h2>Phases</h2>
    ${run.cause ? "" : html`<p class="soft">Of the next request: held, the switch that it waits for, the first token.</p>`}
    <ol aria-live="polite">${steps().map((step) => html`<li>${seconds(step.at)} – ${step.text}</li>`)}</ol>
    <h2>Answer</h2>
    <pre aria-live="off" tabindex="0" role="region" aria-label="Answer">${run.text}</pre>`;
}

// Own observations and the events with this request's id, in order.
function steps() {
  const seen = store.events.filter((event) => run.cause && event.cause === run.cause && PHASES[kind(event)])
    .map((event) => ({ at: Math.max(0, event.at - run.began), text: `${PHASES[kind(event)]} (${event.seat})` }));
  return [...run.steps, ...seen].sort((a, b) => a.at - b.at);
}

const step = (text) => run.steps.push({ at: now() - run.began, text });

async function send(form, draw) {
  const { model, tokens, prompt } = form.elements;
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  run.cause = `page-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
  Object.assign(run, { began: now(), steps: [], text: "", abort: new AbortController() });
  step("sent");
  draw();
  try {
    const body = { model: model.value, stream: true, max_tokens: Number(tokens.value),
      messages: [{ role: "user", content: prompt.value }] };
    const headers = { "Content-Type": "application/json", "X-Request-Id": run.cause, ...authorization() };
    const answer = await fetch("chat", { method: "POST", headers, body: JSON.stringify(body), signal: run.abort.signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const held = Number(answer.headers.get("X-Kyb-Held-Seconds") || 0);
    step(`the engine of seat ${answer.headers.get("X-Kyb-Seat")} answers; held ${seconds(held)}`);
    await read(answer.body.getReader(), draw);
    step("answered");
  } catch (error) {
    step(error.name === "AbortError" ? "stopped" : `failed: ${error.message}`);
  }
  run.abort = null;
  draw();
}

async function read(reader, draw) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) takeLine(line);
    draw();
  }
}

function takeLine(line) {
  if (!line.startsWith("data: ") || line === "data: [DONE]") return;
  const data = JSON.parse(line.slice(6));
  if (data.error) throw new Error(data.error.message);
  const delta = data.choices && data.choices[0] && data.choices[0].delta;
  if (!delta || !delta.content) return;
  if (!run.text) step("first token");
  run.text += delta.content;
}
