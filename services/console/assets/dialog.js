// The dialog with details that the address names: an event, a block of the timeline, a request.

import { html, render } from "./vendor/lit-html/lit-html.js";
import { eventDialog } from "./events.js";
import { requestDialog } from "./requests.js";
import { dialog, leaveDialog } from "./route.js";
import { blockDialog } from "./timeline.js";

const CONTENTS = { event: eventDialog, block: blockDialog, request: requestDialog };
const element = document.getElementById("details");
let closing = false;

export function drawDialog(draw) {
  const named = dialog();
  if (!named) {
    closing = false;
    if (element.open) element.close();
    return;
  }
  if (closing) return;
  const [kind, value] = named;
  render(html`${CONTENTS[kind](value, draw)}<form method="dialog"><button autofocus>Close</button></form>`, element);
  if (!element.open) element.showModal();
}

element.addEventListener("close", () => {
  if (!dialog()) return;
  closing = true;
  leaveDialog();
});
