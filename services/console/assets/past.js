// Reads what a view shows and the page does not know: after a choice of the window, and after each connection.

import { say } from "./feedback.js";
import { loadPast, store } from "./store.js";

let reading = false;
let earliest = 0;  // the console knows no more than what is known since then

// Asks again, after a choice of another window, for what could not be read.
export const askPast = () => (earliest = 0);

export async function readPast(from, draw) {
  if (reading || from >= store.since - 1 || store.since === earliest) return;
  reading = true;
  try {
    await loadPast(from);
  } catch (error) {
    say(`The past cannot be read: ${error.message}`);
  }
  reading = false;
  earliest = store.since > from + 1 ? store.since : 0;
  draw();
}
