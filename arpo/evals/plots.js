// ---- plots: SVG that shrinks with the page; each has named axes, and says in words what it shows

const label = (x, y, words, anchor = "start", kind = "") => svg("text", {x, y, "text-anchor": anchor, class: kind}, words);
const FILLS = {right: "var(--good)", partly: "var(--accent)", wrong: "var(--bad)"};
const OPACITY = {right: 0.85, partly: 0.6, wrong: 0.35};  // so that they differ without colours, too

function plot(title, words, width, height, parts, legend = null) {
  return el("figure", {}, el("figcaption", {class: "small"}, title),
    svg("svg", {viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${title}. ${words}`}, ...parts),
    legend);
}

function axisNames(left, width, height, xName, yName) {  // of a plot whose frame is [left, left + width] x [10, 10 + height]
  return [label(left + width / 2, height + 38, xName, "middle", "name"),
    svg("text", {transform: `translate(11 ${10 + height / 2}) rotate(-90)`, "text-anchor": "middle", class: "name"}, yName)];
}

function accuracyPlot() {
  const rows = Object.entries(DATA.scores), left = 118, width = 300, x = v => left + v * width, bottom = 22 * rows.length;
  const parts = [0, 0.25, 0.5, 0.75, 1].flatMap(v => [
    svg("line", {class: "axis", x1: x(v), x2: x(v), y1: 0, y2: bottom}), label(x(v), bottom + 14, String(v), "middle")]);
  rows.forEach(([name, s], i) => {
    const y = 22 * i + 11;
    parts.push(label(left - 6, y + 4, cut(name, 17), "end"),
      svg("rect", {x: left, y: y - 7, width: width * Math.min(Math.max(s.accuracy, 0), 1), height: 14, fill: "var(--accent)",
        opacity: 0.6, class: "bar", "data-value": s.accuracy}),
      svg("line", {x1: x(s.accuracy_low), x2: x(s.accuracy_high), y1: y, y2: y, stroke: "var(--ink)", "stroke-width": 1.5}),
      label(left + width + 8, y + 4, s.accuracy.toFixed(3)));
  });
  parts.push(label(left + width / 2, bottom + 30, "accuracy: mean over questions and samples", "middle", "name"));
  return plot("Accuracy, with 95 % intervals over questions",
    rows.map(([name, s]) => `${name} ${short(s.accuracy)} from ${short(s.accuracy_low)} to ${short(s.accuracy_high)}`).join("; "),
    left + width + 46, bottom + 36, parts);
}

function spread(ys, gap, lowest, highest) {  // the nearest places to `ys` (sorted) that are `gap` apart, within the bounds
  const placed = [];
  ys.forEach((y, i) => placed.push(Math.max(y, i ? placed[i - 1] + gap : lowest)));
  for (let i = placed.length - 1, limit = highest; i >= 0; i--, limit -= gap) placed[i] = Math.min(placed[i], limit);
  return placed;
}

function passPlot() {
  const lines = Object.entries(DATA.scores).filter(([, s]) => s.samples > 1);
  if (!lines.length) return null;
  const left = 52, width = 270, height = Math.max(180, 13 * lines.length), most = Math.max(...lines.map(([, s]) => s.samples));
  const x = k => left + width * Math.log2(k) / Math.log2(most), y = v => 10 + height * (1 - v);
  const parts = [0, 0.25, 0.5, 0.75, 1].flatMap(v => [
    svg("line", {class: "axis", x1: left, x2: left + width, y1: y(v), y2: y(v)}), label(left - 6, y(v) + 4, String(v), "end")]);
  const ends = lines.map(([name, s], i) => {
    const points = Object.keys(s).filter(k => k.startsWith("pass@")).map(k => [Number(k.slice(5)), s[k]]);
    const hue = Math.round(i * 137.5) % 360, paint = `light-dark(hsl(${hue} 70% 36%), hsl(${hue} 65% 68%))`;
    parts.push(svg("polyline", {points: points.map(([k, v]) => `${x(k)},${y(v)}`).join(" "), fill: "none", class: "curve",
      style: `stroke: ${paint}`, "stroke-width": 1.6, "stroke-dasharray": ["none", "6 3", "2 2"][i % 3]}));
    for (const [k, v] of points) parts.push(svg("circle", {cx: x(k), cy: y(v), r: 2.4, style: `fill: ${paint}`}));
    const [k, v] = points[points.length - 1];
    return {name, k, v, paint};
  }).sort((a, b) => b.v - a.v);
  const places = spread(ends.map(end => y(end.v)), 13, 10, height + 10), right = left + width;
  ends.forEach((end, i) => parts.push(  // names stand apart even where lines end together
    svg("line", {x1: x(end.k) + 4, y1: y(end.v), x2: right + 20, y2: places[i], style: `stroke: ${end.paint}`, opacity: 0.5}),
    svg("text", {x: right + 24, y: places[i] + 4, style: `fill: ${end.paint}`, class: "ending"},
      `${cut(end.name, 17)} ${end.v.toFixed(2)}`)));
  for (let k = 1; k <= most; k *= 2) parts.push(label(x(k), height + 24, String(k), "middle"));
  parts.push(...axisNames(left, width, height, "k: samples of a question", "share of questions solved"));
  return plot("Pass@k: at least one of k samples is right", ends.map(({name, k, v}) => `${name}: ${short(v)} at k = ${k}`).join("; "),
    right + 160, height + 44, parts);
}

function histogram(title, xName, value, bins) {  // of the transcripts of the list, right ones below wrong ones
  const shown = state.shown, left = 52, width = 300, height = 150;
  const most = shown.reduce((m, e) => Math.max(m, value(e)), 1), step = Math.max(Math.ceil((most + 1) / bins), 1);
  const columns = Array.from({length: Math.floor(most / step) + 1}, () => ({right: 0, partly: 0, wrong: 0}));
  for (const e of shown) columns[Math.floor(value(e) / step)][grade(e)]++;
  const highest = Math.max(1, ...columns.map(c => c.right + c.partly + c.wrong)), w = width / columns.length, end = columns.length * step;
  const parts = [0, 0.5, 1].filter(v => Number.isInteger(v * highest)).flatMap(v => [
    svg("line", {class: "axis", x1: left, x2: left + width, y1: 10 + height * (1 - v), y2: 10 + height * (1 - v)}),
    label(left - 6, 14 + height * (1 - v), String(v * highest), "end")]);
  columns.forEach((column, i) => {
    let bottom = 10 + height;
    for (const kind of Object.keys(FILLS)) {
      const h = height * column[kind] / highest;
      bottom -= h;
      const range = step > 1 ? `${i * step} to ${(i + 1) * step - 1}` : String(i);
      if (h) parts.push(svg("rect", {x: left + i * w, y: bottom, width: Math.max(w - 1, 1), height: h, opacity: OPACITY[kind],
        fill: FILLS[kind]}, svg("title", {}, `${range}: ${column[kind]} ${kind}`)));
    }
  });
  if (step === 1 && columns.length <= 12) columns.forEach((_, i) => parts.push(label(left + (i + 0.5) * w, height + 24, String(i), "middle")));
  else for (const v of [0, 0.5, 1]) parts.push(label(left + v * width, height + 24, String(Math.round(v * end)), "middle"));
  parts.push(...axisNames(left, width, height, xName, "transcripts"));
  const kinds = Object.keys(FILLS).filter(kind => shown.some(e => grade(e) === kind));
  const legend = el("div", {class: "legend small"}, ...kinds.map(kind => el("span", {},
    svg("svg", {width: 11, height: 11, "aria-hidden": "true"}, svg("rect", {width: 11, height: 11, fill: FILLS[kind], opacity: OPACITY[kind]})),
    ` ${kind} (${shown.filter(e => grade(e) === kind).length})`)));
  const mean = shown.length ? shown.reduce((sum, e) => sum + value(e), 0) / shown.length : 0;
  return plot(title, `${shown.length} transcripts, mean ${short(mean, 1)}, highest ${short(most)} ${xName}`,
    left + width + 20, height + 44, parts, legend);
}

function drawPlots() {
  $("plots")?.replaceChildren(...[accuracyPlot(), passPlot(),
    histogram("Response length, of the listed transcripts", "tokens, tool results included", e => e.tokens, 40),
    histogram("Tool calls, of the listed transcripts", "calls of a transcript", e => e.calls, 24),
    histogram("Time, of the listed transcripts", "seconds, tool calls included", e => Math.floor(e.seconds), 40)].filter(Boolean));
}

