// What all parts share: elements, numbers, words, colours.
const RUN = JSON.parse(document.getElementById("run").textContent);
let DATA;  // of the dump, once it is unpacked
const state = {group: 0, trajectory: null, scale: "turns", colour: "none", compare: ""};
const count = (items, test) => items.filter(test).length;

async function unpack() {
  const bytes = Uint8Array.from(atob($("data").textContent), c => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

const span = (kind, ...kids) => el("span", {class: kind}, ...kids);

// Marks that turn the direction of what follows would show a text in another order than the model wrote it in.
const plain = text => String(text).replace(/[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
  c => `⟨U+${c.codePointAt(0).toString(16).toUpperCase()}⟩`);
const MOST_SHOWN = 100000;  // characters of a text: browsers take minutes for megabytes of it

function words(text) {
  const all = plain(text), half = MOST_SHOWN / 2;
  if (all.length <= MOST_SHOWN) return [all];
  return [all.slice(0, half), span("warn", ` … ${all.length - MOST_SHOWN} characters are not shown … `), all.slice(-half)];
}
const prose = (tag, attributes, text) => el(tag, {dir: "auto", ...attributes}, ...words(text));

const isNumber = value => typeof value === "number";  // else null (unknown), or a word: "nan", "inf", "-inf"
const fixed = (value, digits = 2) => isNumber(value) ? value.toFixed(digits) : String(value ?? "–");
const short = (value, digits = 3) => isNumber(value) ? String(Number(value.toFixed(digits))) : fixed(value);
const sign = value => value > 0 ? "good" : value < 0 ? "bad" : "soft";
const finite = value => isNumber(value) ? value : 0;
const seconds = s => !isNumber(s) ? fixed(s) : s < 1 ? `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms` : `${s.toFixed(1)} s`;
const signed = value => (value > 0 ? "+" : "") + fixed(value);
const OUTCOMES = {branched: ["◆", "good"], declined: ["◇", "soft"], no_budget: ["∅", "warn"],
                  refused: ["⊘", "warn"]};  // mark, colour

const mark = decision => OUTCOMES[decision.outcome]?.[0] ?? "?";

function callStatus(call) {  // [words, colour]
  if (!call.executed) return [`${call.error_kind}, not run`, "bad"];
  return [(call.ok ? "ok" : call.error_kind ?? "failed") + (call.cached ? ", cached" : ""), call.ok ? "good" : "bad"];
}
const isForward = d => d.probability !== null && !isNumber(d.score);  // else it was chosen after all had ended

function decisionRecord(d) {
  return `${mark(d)} ${d.outcome}, children: ${d.num_children}\n`
    + (d.refused_by ? `the open session of ${d.refused_by} allows no branch\n`
      : isForward(d) ? `P(branch) ${short(d.probability)}, draw ${short(d.draw)}\n`
      : `score ${short(d.score, 4)}` + (d.rank ? `, rank ${d.rank}` : "") + ", chosen after all had ended\n")
    + `H ${fixed(d.entropy, 4)}, baseline ${fixed(d.root_entropy, 4)}\n`
    + `ΔH ${fixed(d.entropy - d.root_entropy, 4)} nats\nbudget left ${d.budget_left}, consecutive ${d.consecutive}`
    + (d.statistics ? `\nearlier ${d.statistics.count}: mean ${short(d.statistics.mean, 4)}, `
      + `deviation ${short(d.statistics.std, 4)}, bound ${short(d.statistics.bound, 4)}` : "");
}

// The 98th percentile, so that one outlier does not make all the others look alike; `otherwise` where it is none or 0.
function highest(values, otherwise) {
  const sorted = values.filter(isNumber).sort((a, b) => a - b);
  return sorted[Math.floor((sorted.length - 1) * 0.98)] || otherwise;
}
const isPhone = () => window.innerWidth <= 700;  // as in the style

function reveal(box, part) {  // scrolls the box, never the page
  const [outer, inner] = [box.getBoundingClientRect(), part.getBoundingClientRect()];
  if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top;
  else if (inner.bottom > outer.bottom) box.scrollTop += Math.min(inner.bottom - outer.bottom, inner.top - outer.top);
}

const hottest = {turn: 1, entropy: 1, logprob: 5,  // nats at which a colour is at its end; of logprobs: of -logprob
  seconds: 1};  // at which the bar of a call is
const heatOf = (value, end) => isNumber(value)
  ? `color-mix(in oklab, var(--hot) ${(100 * Math.min(Math.max(value / end, 0), 1)).toFixed(1)}%, var(--cold))`
  : "var(--panel)";
const heat = entropy => heatOf(entropy, hottest.turn);
