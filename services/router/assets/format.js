// Texts for people.

const pad = (number) => String(number).padStart(2, "0");

export function clock(at) {
  const day = new Date(at * 1000);
  return `${pad(day.getHours())}:${pad(day.getMinutes())}:${pad(day.getSeconds())}`;
}

export function seconds(value) {
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

export function bytes(value) {
  if (!value) return "–";
  return value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${Math.round(value / 2 ** 20)} MiB`;
}

export const kind = (event) => event.type.replace("ai.kyb.v1.", "");

const HUES = [212, 24, 150, 330, 268, 190, 2, 100, 40, 236, 300, 172];

// The colour of a model: always the same one.
export function colour(model) {
  let sum = 0;
  for (const letter of model) sum = (sum * 31 + letter.codePointAt(0)) >>> 0;
  return `hsl(${HUES[sum % HUES.length]} 58% ${sum % 24 < 12 ? 33 : 27}%)`;
}
