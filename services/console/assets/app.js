// The frame: which view is shown, and when it is drawn again.

import { html, nothing, render } from "./vendor/lit-html/lit-html.js";
import { eventsView } from "./events.js";
import { say } from "./feedback.js";
import { modelsView } from "./models.js";
import { nodesView } from "./nodes.js";
import { planView } from "./plan.js";
import { playgroundView } from "./playground.js";
import { follow, json, key, store } from "./store.js";
import { drawTimeline, timelineView } from "./timeline.js";

const VIEWS = {
  timeline: ["Timeline", timelineView],
  models: ["Models", modelsView],
  nodes: ["Nodes", nodesView],
  events: ["Events", eventsView],
  playground: ["Playground", playgroundView],
  plan: ["Plan", planView],
};
const byId = (id) => document.getElementById(id);
let shown = "";
let planned = false;

const offered = (name) => name in VIEWS && (name !== "plan" || store.plans);
// The link to the content, #main, keeps the view.
const chosen = () => (offered(location.hash.slice(1)) ? location.hash.slice(1) : shown || "timeline");

// Draws everything once per frame at most, however much changes.
function draw() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => {
    planned = false;
    const view = chosen();
    if (view !== shown) {
      document.title = `${VIEWS[view][0]} · Kybernate`;
      shown = view;
    }
    render(nav(view), byId("nav"));
    render(tools(), byId("tools"));
    render(troubles(), byId("troubles"));
    render(store.since ? VIEWS[view][1](draw) : html`<p>Waiting for the router. It is asked again every 2 seconds.</p>`, byId("main"));
    if (view === "timeline") drawTimeline();
  });
}

const nav = (view) => Object.entries(VIEWS).filter(([name]) => offered(name)).map(
  ([name, [text]]) => html`<a href="#${name}" aria-current=${name === view ? "page" : nothing}>${text}</a>`,
);

const tools = () => html`
  ${store.keys
    ? html`<label>Operator key <input type="password" autocomplete="off" size="12" .value=${key()} @change=${setKey}></label>`
    : nothing}
  <span class=${store.connected ? "good" : "bad"}>${store.connected ? "● live" : "○ not connected"}</span>`;

const troubles = () => Object.values(store.troubles).map(
  (text) => html`<p class="banner">${text[0].toUpperCase()}${text.slice(1)}. What is shown may be old.</p>`,
);

async function setKey(event) {
  const typed = event.target.value.trim();
  if (!/^[!-~]*$/.test(typed)) {
    say("This is no key: it has characters that no key has.");
    return;
  }
  sessionStorage.setItem("key", typed);
  try {
    await json("allowed");
    say("This key may send commands.");
  } catch (error) {
    say(error.message);
  }
  draw();
}

window.addEventListener("hashchange", draw);
window.addEventListener("resize", draw);
draw();
follow(draw);
