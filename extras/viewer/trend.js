// The run's other steps, or an evaluation's other sets: picker, and what its numbers did.
const KINDS = {step: "training", valid: "validation", test: "test", nonfinite: "non-finite loss", set: "sets of questions"};
const kindOf = one => one?.step === null ? "set" : one?.kind;
const HERE = RUN.steps.find(one => one.shown);

const address = page => page.split("/").map(encodeURIComponent).join("/") + "#" + settings();
const go = page => { location.href = address(page); };

function neighbourStep(by) {  // the next page of the same kind, in steps
  const pages = RUN.steps.filter(one => kindOf(one) === kindOf(HERE) && (one.page || one === HERE));
  return pages[pages.indexOf(HERE) + by];
}

function drawSteps() {
  const kinds = [...new Set(RUN.steps.map(kindOf))];
  kinds.sort((a, b) => Object.keys(KINDS).indexOf(a) - Object.keys(KINDS).indexOf(b));
  $("steps").hidden = !RUN.steps.length;
  if (!HERE) $("step").append(el("option", {value: ""}, "steps of this run"));
  $("step").append(...kinds.map(kind => el("optgroup", {label: KINDS[kind] ?? kind},
    ...RUN.steps.filter(one => kindOf(one) === kind).map(one => build(el("option", {value: RUN.steps.indexOf(one)}),
      one === HERE ? {selected: ""} : one.page ? {} : {disabled: ""},
      [(kind === "set" ? one.kind : `${KINDS[kind] ?? kind} step ${one.step}`) + (one.page || one === HERE ? "" : " (no page: raise --pages)")])))));
  $("step").addEventListener("change", () => go(RUN.steps[$("step").value].page));
  for (const [id, by] of [["previous", -1], ["next", 1]]) {
    const target = HERE && neighbourStep(by);
    $(id).disabled = !target;
    if (target) $(id).addEventListener("click", () => go(target.page));
  }
  $("links").append(...RUN.reports.map(report =>
    el("a", {href: report.split("/").map(encodeURIComponent).join("/")}, "report of the evaluation")));
}

// ---- charts

const WIDTH = 160, HEIGHT = 84, LEFT = 48, RIGHT = 10, TOP = 8, BOTTOM = 18;

const brief = value => String(Number(value.toPrecision(3)));

function drawChart({title, lines}) {
  const points = lines.flatMap(line => line.points).filter(([, value]) => isNumber(value));
  const steps = points.map(([step]) => step), values = points.map(([, value]) => value);
  if (!points.length) return null;
  const [first, last] = [Math.min(...steps), Math.max(...steps)], [low, high] = [Math.min(...values), Math.max(...values)];
  const x = step => LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first || 1);
  const y = value => TOP + (HEIGHT - TOP - BOTTOM) * (high === low ? 0.5 : (high - value) / (high - low));
  const text = (left, top, anchor, words) =>
    svg("text", {x: left, y: top, class: "small soft", "text-anchor": anchor}, words);
  const pages = RUN.steps.filter(one => one.page && one.step >= first && one.step <= last);
  const nearest = event => {
    const step = first + (event.offsetX - LEFT) / (WIDTH - LEFT - RIGHT) * (last - first);
    const near = [...pages].sort((a, b) => Math.abs(a.step - step) - Math.abs(b.step - step)
      || (a.kind === (HERE?.kind ?? "step") ? -1 : 1))[0];
    if (near && near !== HERE) go(near.page);
  };
  const draw = line => {
    const shown = line.points.filter(([, value]) => isNumber(value));
    const d = shown.map(([step, value], k) => `${k ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join(" ");
    return svg("g", {class: `line line-${line.label === "training" ? 0 : 1}`}, svg("path", {d}),
      ...(shown.length < 30 ? shown.map(([step, value]) => svg("circle", {cx: x(step), cy: y(value), r: 1.8})) : []));
  };
  const spans = lines.map(({label, points: all}) => {
    const known = all.filter(([, value]) => isNumber(value)), words = [known[0], known.at(-1)].filter(Boolean);
    return `${label} ${words.map(([step, value]) => `${brief(value)} at step ${step}`).join(" to ")}`;
  });
  const isInside = HERE && HERE.step >= first && HERE.step <= last;
  return el("figure", {}, el("figcaption", {class: "small"}, title),
    svg("svg", {width: WIDTH, height: HEIGHT, role: "img", onclick: nearest, class: pages.length ? "clickable" : "",
      "aria-label": `${title}: ${spans.join("; ")}`},
      svg("title", {}, lines.map(line => line.name).join(", ") + (pages.length ? "\nclick: the nearest dumped step" : "")),
      svg("rect", {x: 0, y: 0, width: WIDTH, height: HEIGHT, fill: "transparent"}),
      svg("path", {class: "axis", d: `M${LEFT} ${TOP} V${HEIGHT - BOTTOM} H${WIDTH - RIGHT}`}),
      ...pages.map(one => svg("path", {class: "dumped", d: `M${x(one.step)} ${HEIGHT - BOTTOM} v4`})),
      isInside ? svg("path", {class: "here", d: `M${x(HERE.step)} ${TOP - 4} V${HEIGHT - BOTTOM + 4}`}) : null,
      ...lines.map(draw),
      text(LEFT - 4, TOP + 7, "end", brief(high)), text(LEFT - 4, HEIGHT - BOTTOM, "end", high === low ? "" : brief(low)),
      text(LEFT, HEIGHT - 3, "start", String(first)), text(WIDTH - RIGHT, HEIGHT - 3, "end", `step ${last}`)));
}

function drawTrend() {
  const charts = RUN.trend.map(drawChart).filter(Boolean);
  $("trend").hidden = !charts.length;
  $("trend").open = !isPhone() && window.innerHeight >= 1000;  // else the tree needs the room
  $("charts").replaceChildren(...charts);
}
