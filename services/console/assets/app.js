// The frame: which view is shown, and when it is drawn again.

import { html, nothing, render } from "./vendor/lit-html/lit-html.js";
import { chartsView } from "./charts.js";
import { drawDialog } from "./dialog.js";
import { eventsView } from "./events.js";
import { say } from "./feedback.js";
import { modelPage } from "./model.js";
import { modelsView } from "./models.js";
import { nodesView } from "./nodes.js";
import { playgroundView } from "./playground.js";
import { problemsLine } from "./problems.js";
import { requestsView } from "./requests.js";
import { listHref, route, watch } from "./route.js";
import { askAgain, follow, json, key, store } from "./store.js";
import { tenantsView } from "./tenants.js";
import { drawTimeline, timelineView } from "./timeline.js";

const VIEWS = {
  timeline: ["Timeline", timelineView],
  models: ["Models", (draw) => (route().name ? modelPage(route().name, draw) : modelsView(draw))],
  nodes: ["Nodes", nodesView],
  requests: ["Requests", requestsView],
  events: ["Events", eventsView],
  charts: ["Charts", chartsView],
  tenants: ["Tenants", tenantsView],
  playground: ["Playground", playgroundView],
};
const byId = (id) => document.getElementById(id);
const lists = new Map();  // view -> its last address, with its filters
let shown = "";
let planned = false;


// Draws everything once per frame at most, however much changes.
function draw() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => {
    planned = false;
    const { view: named, name } = route(), view = named || "timeline", known = Object.hasOwn(VIEWS, view);
    const title = name || (known ? VIEWS[view][0] : "Not found");
    document.title = `${title} · Kybernate`;
    if (known && !name) lists.set(view, listHref());
    render(nav(view, name), byId("nav"));
    render(tools(), byId("tools"));
    render(troubles(), byId("troubles"));
    render(problemsLine(), byId("problems"));
    render(content(view, known), byId("main"));
    if (`${view}/${name}` !== shown && shown) window.scrollTo(0, 0);
    shown = `${view}/${name}`;
    if (store.since) drawDialog(draw);
    if (view === "timeline") drawTimeline();
  });
}

function content(view, known) {
  if (!store.since) return html`<p role="status">Waiting for the console. It is asked again every 2 seconds.</p>`;
  if (known) return VIEWS[view][1](draw);
  return html`<h1>Not found</h1><p>There is no view “${view}” here. <a href="#timeline">Timeline</a></p>`;
}

// The present view's link leads to its whole list, another one's to what was shown there last.
const nav = (view, named) => Object.entries(VIEWS).map(
  ([name, [text]]) => html`<a href=${(name !== view || named) && lists.get(name) || `#${name}`} aria-current=${name === view ? "page" : nothing}>${text}</a>`,
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
  askAgain();
  try {
    await json("allowed");
    say("This key may send commands.");
  } catch (error) {
    say(error.message);
  }
  draw();
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();  // the address names the view
  byId("main").focus();
});
watch(draw);
window.addEventListener("resize", draw);
draw();
follow(draw);
