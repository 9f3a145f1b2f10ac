// What the address names: #VIEW/NAME?PARAMETERS. A dialog is a parameter, so that Back closes it and a link opens it.

const WRITE_MS = 250;  // browsers refuse hundreds of changes of the address
const DIALOGS = ["event", "block", "request"];

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function parse() {
  const [path, query = ""] = location.hash.slice(1).split(/\?(.*)/s);
  const [view, ...rest] = path.split("/");
  return { view, name: decoded(rest.join("/")), params: new URLSearchParams(query) };
}

let current = parse();
let timer = 0;
let changed = () => {};

// A link. Parameters without a value are left out.
export function href(view, name = "", params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value)).toString();
  return `#${view}${name ? `/${encodeURIComponent(name)}` : ""}${query ? `?${query}` : ""}`;
}

export const route = () => current;
export const param = (name) => current.params.get(name) || "";
export const listHref = () => href(current.view, "", Object.fromEntries([...current.params].filter(([name]) => !DIALOGS.includes(name))));

function write() {
  clearTimeout(timer);
  history.replaceState(history.state, "", href(current.view, current.name, Object.fromEntries(current.params)));
}

function merge(params) {
  for (const [name, value] of Object.entries(params)) value ? current.params.set(name, value) : current.params.delete(name);
}

// Changes parameters of what is shown, such as a filter.
export function set(params) {
  merge(params);
  clearTimeout(timer);
  timer = setTimeout(write, WRITE_MS);
  changed();
}

// Opens a dialog: {event: ID}, {block: …}, {request: ID}.
export function open(params) {
  write();
  current = { ...current, params: new URLSearchParams(current.params) };
  for (const name of DIALOGS) current.params.delete(name);
  merge(params);
  history.pushState({ dialog: true }, "", href(current.view, current.name, Object.fromEntries(current.params)));
  changed();
}

// [kind, value] of the dialog that the address names.
export function dialog() {
  const kind = DIALOGS.find((name) => param(name));
  return kind ? [kind, param(kind)] : null;
}

// Leaves the dialog that the page opened as Back does, else by its parameters.
export function leaveDialog() {
  if (!dialog()) return;
  if (history.state && history.state.dialog) history.back();
  else set({ event: "", at: "", block: "", request: "" });
}

export function watch(draw) {
  changed = draw;
  for (const kind of ["popstate", "hashchange"]) {
    window.addEventListener(kind, () => {
      clearTimeout(timer);
      current = parse();
      draw();
    });
  }
}
