// A chart: areas over time, one above the other, with a legend. Plain SVG.

import { html, svg } from "./vendor/lit-html/lit-html.js";
import { clock } from "./format.js";

const WIDTH = 600, HEIGHT = 90;

// {title, series: [{name, colour, values}], from, until, most, show}: values are at equal distances from ``from`` to
// ``until``; ``show`` writes a value. The last value is that of now.
export function chart({ title, series, from, until, most = 0, show }) {
  const sums = series.length ? series[0].values.map((_, at) => series.reduce((sum, each) => sum + each.values[at], 0)) : [];
  const top = Math.max(most, ...sums) || 1, last = sums.length ? sums[sums.length - 1] : 0;
  const text = sums.length ? `now ${show(last)}, at most ${show(Math.max(...sums))}${most ? ` of ${show(most)}` : ""}` : "nothing known yet";
  const below = sums.map(() => 0);
  return html`<figure class="chart"><figcaption><strong>${title}</strong> <span class="soft">${text}</span></figcaption>
    <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img"
      aria-label="${title} from ${clock(from)} to ${clock(until)}: ${text}">${series.map((each) => {
        const line = each.values.map((value, at) => (below[at] += value));
        return svg`<path d=${area(line, line.map((value, at) => value - each.values[at]), top)} fill=${each.colour}></path>`;
      })}</svg>
    <div class="ends soft"><span>${clock(from)}</span><span>${show(top)} at the top</span><span>${clock(until)}</span></div>
    ${series.length > 1
      ? html`<ul class="legend">${series.map((each) => html`<li><svg class="key" viewBox="0 0 1 1" aria-hidden="true"><rect width="1" height="1" fill=${each.colour}></rect></svg>
        ${each.name} ${show(each.values[each.values.length - 1])}</li>`)}</ul>`
      : ""}</figure>`;
}

// Each value lasts until the next one.
function area(upper, lower, top) {
  const step = WIDTH / Math.max(1, upper.length - 1), y = (value) => (HEIGHT - (value / top) * HEIGHT).toFixed(1);
  const steps = (line) => line.slice(0, -1).flatMap((value, at) => [`${(at * step).toFixed(1)},${y(value)}`, `${((at + 1) * step).toFixed(1)},${y(value)}`]);
  return `M${steps(upper).join("L")}L${steps(lower).reverse().join("L")}Z`;
}
