// Playground: a conversation, and the phases that its last request goes through.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { count, kind, seconds } from "./format.js";
import { href, param, set } from "./route.js";
import { authorization, models, now, store } from "./store.js";

const OF_VICTIM = {
  "seat-closed": "the victim drains",
  "seat-evicted": "the victim is parked",
  "seat-parked": "the victim's VRAM is free",
};
const OF_MODEL = {
  "seat-leased": "the seat is activated",
  "seat-moved": "the seat is activated on another group",
  "seat-activated": "the seat is active",
};
const run = { cause: "", model: "", began: 0, steps: [], abort: null, first: 0 };
let turns = [];  // {role, content, note}

export function playgroundView(draw) {
  const names = models().map((row) => row.model).sort(), wanted = param("model");
  return html`<h1>Playground</h1>
    <h2>Conversation</h2>
    ${turns.length ? nothing : html`<p class="soft">Each message is sent with those before it.</p>`}
    <ol class="turns" aria-live="off">${turns.map((turn) => html`<li><strong>${turn.role === "user" ? "You" : turn.model}</strong>
      <span class="soft">${turn.note}</span><pre tabindex="0" role="region" aria-label=${turn.role === "user" ? "Message" : "Answer"}>${turn.content}</pre></li>`)}</ol>
    <form @keydown=${enterSends} @submit=${(event) => { event.preventDefault(); send(event.target, draw); }}>
      <label for="prompt">Message <span class="soft">Enter sends, Shift and Enter begins a line</span></label>
      <textarea id="prompt" name="prompt" rows="3" required>Hello</textarea>
      <div class="bar">
        <label>Model <select name="model" required @change=${(event) => set({ model: event.target.value })}>${names.map((name) => html`<option ?selected=${name === wanted}>${name}</option>`)}</select></label>
        <label>Most tokens <input name="tokens" type="number" min="1" max="4096" value="64"></label>
        ${run.abort
          ? html`<button type="button" @click=${() => run.abort.abort()}>Stop</button>`
          : html`<button ?disabled=${names.length === 0}>Send</button>
            ${turns.length ? html`<button type="button" @click=${() => { turns = []; Object.assign(run, { cause: "", steps: [] }); draw(); }}>New conversation</button>` : nothing}`}
        ${names.length ? nothing : html`<span>No model has a seat yet.</span>`}
      </div>
    </form>
    <h2>Phases</h2>
    ${run.cause ? nothing : html`<p class="soft">Of the next request: held, the switch that it waits for, the first token.</p>`}
    <ol aria-live="polite">${steps().map((step) => html`<li>${seconds(step.at)} – ${step.text}</li>`)}</ol>
    ${run.abort && !run.first ? html`<p id="waits">${waitsFor()}</p>` : nothing}`;
}

// Why no token has come: what the seats of the model do, as status and `kyb why` say it.
function waitsFor() {
  const seats = [...store.seats.values()].filter((seat) => seat.model === run.model && seat.state !== "free");
  const of = (seat) => `${seat.state}${seat.blocked || seat.reason ? `: ${seat.blocked || seat.reason}` : ""}`;
  return html`<a href=${href("models", run.model)}>${run.model}</a> is ${seats.map(of).join("; ") || "without a seat"}`;
}

function enterSends(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target.name !== "prompt") return;
  event.preventDefault();
  if (!run.abort) event.currentTarget.requestSubmit();
}

// Own observations and the events with this request's id, in order; when its own seat is parked later, it has ended.
function steps() {
  const phase = (event) => (event.model === run.model ? OF_MODEL : OF_VICTIM)[kind(event)];
  const seen = store.events.filter((event) => run.cause && event.cause === run.cause && phase(event))
    .map((event) => ({ at: Math.max(0, event.at - run.began), text: `${phase(event)} (${event.model})` }));
  return [...run.steps, ...seen].sort((a, b) => a.at - b.at);
}

const step = (text) => run.steps.push({ at: now() - run.began, text });

async function send(form, draw) {
  const { model, tokens, prompt } = form.elements;
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  run.cause = `page-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
  Object.assign(run, { model: model.value, began: now(), steps: [], abort: new AbortController(), first: 0 });
  const earlier = turns.filter((turn) => turn.content);  // an answer that failed has none
  const answer = { role: "assistant", model: model.value, content: "", note: "" };
  turns = [...earlier, { role: "user", content: prompt.value, note: "" }, answer];
  prompt.value = "";
  step("sent");
  draw();
  try {
    const messages = turns.slice(0, -1).map(({ role, content }) => ({ role, content }));
    const body = { model: model.value, stream: true, stream_options: { include_usage: true }, max_tokens: Number(tokens.value), messages };
    const headers = { "Content-Type": "application/json", "X-Request-Id": run.cause, ...authorization() };
    const reply = await fetch("chat", { method: "POST", headers, body: JSON.stringify(body), signal: run.abort.signal });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    const held = Number(reply.headers.get("X-Kyb-Held-Seconds") || 0);
    step(`the engine answers; held ${seconds(held)}`);
    await read(reply.body.getReader(), answer, draw);
    step("answered");
  } catch (error) {
    answer.note = error.name === "AbortError" ? "stopped" : `failed: ${error.message}`;
    step(answer.note);
  }
  run.abort = null;
  draw();
}

async function read(reader, answer, draw) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) takeLine(line, answer);
    draw();
  }
}

function takeLine(line, answer) {
  if (!line.startsWith("data: ") || line === "data: [DONE]") return;
  const data = JSON.parse(line.slice(6));
  if (data.error) throw new Error(data.error.message);
  if (data.usage && run.first) {
    const { completion_tokens: tokens } = data.usage, time = now() - run.first;
    answer.note = `${count(tokens, "token")}${time > 0.05 ? `, ${Math.round(tokens / time)} tokens/s after the first` : ""}`;
  }
  const delta = data.choices && data.choices[0] && data.choices[0].delta;
  if (!delta || !delta.content) return;
  if (!run.first) {
    run.first = now();
    step("first token");
  }
  answer.content += delta.content;
}
