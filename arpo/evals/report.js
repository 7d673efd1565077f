"use strict";
@@ELEMENTS@@
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLUMNS = ["benchmark", "question_id", "sample", "correct", "reason", "stop", "tokens", "calls", "failed",
  "seconds", "split", "preview"];
const ENTRIES = DATA.index.map((row, number) => ({number, ...Object.fromEntries(COLUMNS.map((c, i) => [c, row[i]]))}));
const PACKED = [...document.getElementsByClassName("block")];
const HEIGHT = 46;  // of an item of the list
const state = {shown: ENTRIES, selected: null, search: 0};
const isPhone = () => matchMedia("(max-width: 700px)").matches;

const button = (words, onclick, attributes = {}) => el("button", {type: "button", onclick, ...attributes}, words);
const short = (value, digits = 3) => typeof value === "number" ? String(Number(value.toFixed(digits))) : String(value);
const cut = (text, most) => text.length > most ? text.slice(0, most - 1) + "…" : text;
const grade = e => e.correct >= 1 ? "right" : e.correct > 0 ? "partly" : "wrong";
const colour = e => ({right: "good", partly: "", wrong: "bad"})[grade(e)];
const nameOf = e => `${e.benchmark} ${e.question_id} #${e.sample}`;

// ---- transcripts, unpacked when they are needed

async function unpack(block) {  // the transcripts of a block
  const bytes = Uint8Array.from(atob(PACKED[block].textContent), c => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}
const lately = new Map();  // block -> promise of its transcripts; a few, since unpacked they are large
function transcripts(block) {
  if (!lately.has(block)) lately.set(block, unpack(block));
  if (lately.size > 4) lately.delete(lately.keys().next().value);
  return lately.get(block);
}
async function transcript(e) {  // undefined where the page was too full for it
  const block = Math.floor(e.number / DATA.block);
  return PACKED[block] && (await transcripts(block))[e.number % DATA.block];
}
const haystack = t => [t.question, ...t.answers, t.prediction, t.judge_reply, ...t.segments.map(run => run[0])]
  .join("\n").toLowerCase();

// ---- the list: a listbox, whose options are drawn where they are in sight

function drawList() {
  const list = $("list"), first = Math.floor(list.scrollTop / HEIGHT);
  const last = Math.min(first + Math.ceil(list.clientHeight / HEIGHT) + 1, state.shown.length);
  const items = [el("div", {style: `height: ${state.shown.length * HEIGHT}px`, role: "presentation"})];
  for (let i = first; i < last; i++) {
    const e = state.shown[i], isSelected = e.number === state.selected;
    items.push(el("div", {class: "item" + (isSelected ? " selected" : ""), id: `item${e.number}`, role: "option",
      "aria-selected": isSelected, "aria-posinset": i + 1, "aria-setsize": state.shown.length,
      style: `top: ${i * HEIGHT}px`, onclick: () => open(e.number)},
      el("b", {class: colour(e)}, `${short(e.correct)} ${grade(e)}`), ` ${nameOf(e)} `,
      el("span", {class: "soft small"}, [e.reason, e.calls + " calls", e.tokens + " tokens"].filter(Boolean).join(", ")),
      el("div", {class: "soft small", dir: "auto"}, e.preview)));
  }
  list.replaceChildren(...items);
  const active = $(`item${state.selected}`);
  if (active) list.setAttribute("aria-activedescendant", active.id);
  else list.removeAttribute("aria-activedescendant");
}

function setShown(entries, words) {
  state.shown = entries;
  const right = entries.filter(e => grade(e) === "right").length;
  $("count").textContent = `${entries.length} of ${ENTRIES.length} transcripts, ${right} right ${words}`;
  drawList();
  if (state.selected === null) drawPlots();
}

async function filter() {
  const search = ++state.search, text = $("find").value.trim().toLowerCase();
  const wanted = {benchmark: $("benchmark").value, reason: $("reason").value, stop: $("stop").value};
  const verdict = $("verdict").value;
  const chosen = ENTRIES.filter(e => (!verdict || grade(e) === verdict)
    && Object.entries(wanted).every(([name, value]) => !value || e[name] === value));
  $("list").scrollTop = 0;
  if (!text) return setShown(chosen, "");
  const found = [];
  for (let i = 0; i < chosen.length;) {  // block by block; a later search ends this one
    const block = Math.floor(chosen[i].number / DATA.block);
    const texts = PACKED[block] ? await unpack(block) : [];
    if (search !== state.search) return;
    for (; i < chosen.length && Math.floor(chosen[i].number / DATA.block) === block; i++) {
      const e = chosen[i], t = texts[e.number % DATA.block];
      if (e.question_id.toLowerCase().includes(text) || t && haystack(t).includes(text)) found.push(e);
    }
    if (i < chosen.length && block % 8 === 7) setShown([...found], `(searching: ${Math.round(100 * i / chosen.length)} %)`);
  }
  setShown(found, "");
}

function openBeside(step) {  // the next transcript of the list, the one before, or one a page away
  if (!state.shown.length) return;
  const at = state.shown.findIndex(e => e.number === state.selected) + step;
  const index = Math.min(Math.max(at, 0), state.shown.length - 1);
  const list = $("list"), top = index * HEIGHT;
  if (top < list.scrollTop || top + HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top;
  open(state.shown[index].number);
}

// ---- a transcript

function marked(text, needle) {  // the text, occurrences of the needle marked
  if (!needle) return [text];
  const parts = [], low = text.toLowerCase();
  if (low.length !== text.length) return [text];  // some letters change their length with their case
  let from = 0;
  for (let at; (at = low.indexOf(needle, from)) >= 0; from = at + needle.length)
    parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + needle.length)));
  return [...parts, text.slice(from)];
}

const callLine = call => el("div", {class: "call small"}, el("b", {}, call.tag), " ",
  el("span", {class: call.ok ? "good" : "bad"}, call.ok ? "ok" : call.error_kind ?? "failed"),
  `${call.cached ? ", cached" : ""}${call.executed ? "" : ", not run"} ${short(call.seconds, 2)} s`);

async function siblings(e) {  // a button for each sample of the question, with its grade and answer
  const all = ENTRIES.filter(other => other.benchmark === e.benchmark && other.question_id === e.question_id);
  if (all.length < 2) return null;
  const buttons = await Promise.all(all.map(async other => button(
    [`#${other.sample} ${grade(other)}`, cut((await transcript(other))?.prediction || "no answer", 60)].join(": "),
    () => open(other.number), {class: colour(other), "aria-current": other.number === e.number ? "true" : null})));
  return el("section", {id: "samples", "aria-label": "samples of this question"},
    el("h2", {}, `All ${all.length} samples of this question`), el("div", {class: "buttons"}, ...buttons));
}

function drawTranscript(e, t, samples) {
  const needle = $("find").value.trim().toLowerCase(), calls = [...t.calls];
  const facts = {correct: short(e.correct), grader: t.metric, reason: e.reason || "-", answer: t.prediction || "(none)",
    references: t.answers.join(" | "), stop: e.stop, tokens: `${e.tokens}, ${t.sampled} sampled`,
    seconds: short(e.seconds, 1), split: e.split || "-", ...t.scores};
  const turns = t.segments.flatMap(([text, byModel]) => byModel ? [el("pre", {dir: "auto"}, ...marked(text, needle))]
    : [calls.length ? callLine(calls.shift()) : null, el("pre", {class: "tool", dir: "auto"}, ...marked(text, needle))]);
  const at = state.shown.findIndex(other => other.number === e.number);
  const beside = (words, step) =>
    button(words, () => openBeside(step), {disabled: state.shown[at + step] && at >= 0 ? null : ""});
  $("main").replaceChildren(
    el("h2", {class: colour(e)}, `${grade(e)}: ${nameOf(e)}`),
    el("div", {class: "buttons"}, beside("previous", -1), beside("next", 1), button("all transcripts", toList)),
    el("div", {class: "facts", id: "transcript"},
      ...Object.entries(facts).map(([name, value]) =>
        el("span", {}, el("span", {class: "soft"}, name + " "), typeof value === "number" ? short(value) : value))),
    el("h2", {}, "Question"), el("pre", {id: "question", dir: "auto"}, ...marked(t.question, needle)),
    ...(samples ? [samples] : []),
    el("h2", {}, "Response"), ...turns.filter(Boolean), ...calls.map(callLine),
    ...(t.judge_reply ? [el("h2", {}, "Judge"), el("pre", {id: "judge"}, ...marked(t.judge_reply, needle))] : []));
  $("main").scrollTop = 0;
  if (isPhone()) $("main").scrollIntoView();
}

function toList() {
  $("list").focus();
  $("list").scrollIntoView({block: "nearest"});
}

async function open(number) {
  state.selected = number;
  history.replaceState(null, "", "#" + number);  // an address to keep or to share
  drawList();
  const e = ENTRIES[number], t = await transcript(e), samples = t && await siblings(e);
  if (state.selected !== number) return;
  if (t) drawTranscript(e, t, samples);
  else $("main").replaceChildren(`The page is full: ${nameOf(e)} is in the run's records.`);
}

@@PLOTS@@
// ---- the overview

const isNumber = cell => /^[-+]?[\d.,]+( [†[(]|$)/.test(cell);

function tableOf(t, number) {  // with a header for each column and row; a column is right-aligned where it has numbers
  const numeric = t.head.map((_, i) => t.rows.some(row => isNumber(row[i])) && t.rows.every(row => !row[i] || isNumber(row[i])));
  const kind = (cell, i) => [numeric[i] ? "number" : "", cell.length > 40 && i ? "long" : "", cell.includes("†") ? "unlike" : ""]
    .filter(Boolean).join(" ");
  const cell = (text, i) => i ? el("td", {class: kind(text, i)}, text) : el("th", {scope: "row"}, text);
  return el("section", {"aria-labelledby": `table${number}`}, el("h2", {id: `table${number}`}, t.title),
    el("div", {class: "scroll", tabindex: 0, role: "group", "aria-labelledby": `table${number}`},
      el("table", {"aria-labelledby": `table${number}`},
        el("thead", {}, el("tr", {}, ...t.head.map((text, i) =>
          el("th", {scope: "col", class: numeric[i] ? "number" : ""}, text)))),
        el("tbody", {}, ...t.rows.map(row => el("tr", {}, ...row.map(cell)))))),
    el("div", {class: "small soft"}, t.note));
}

function showOverview() {
  state.selected = null;
  history.replaceState(null, "", location.pathname);
  const [first, ...others] = DATA.tables.map(tableOf);
  $("main").replaceChildren(...[first, el("section", {id: "plots", "aria-label": "plots"}), ...others].filter(Boolean));
  $("main").scrollTop = 0;
  drawPlots();
  drawList();
}

// ---- start

document.title = $("title").textContent = DATA.title;
$("made").append(...DATA.made.map(words => el("span", {}, words)),
  ...DATA.links.map(([words, address]) => el("a", {href: address}, words)));
$("notes").append(...DATA.notes.map(note => el("li", {}, note)));
for (const name of ["benchmark", "reason", "stop"])
  for (const value of [...new Set(ENTRIES.map(e => e[name]))].filter(Boolean)) $(name).append(el("option", {value}, value));
for (const name of ["benchmark", "verdict", "reason", "stop"]) $(name).addEventListener("change", filter);
let typing = 0;
$("find").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(filter, 250); });
$("overview").addEventListener("click", () => { showOverview(); if (isPhone()) $("main").scrollIntoView(); });
$("list").addEventListener("scroll", drawList);
addEventListener("resize", drawList);
document.addEventListener("keydown", event => {
  const at = document.activeElement;
  if (event.key === "/" && !["INPUT", "SELECT"].includes(at.tagName)) { event.preventDefault(); $("find").focus(); }
  if (![document.body, $("list")].includes(at) || event.ctrlKey || event.altKey || event.metaKey) return;
  const page = Math.max(Math.floor($("list").clientHeight / HEIGHT) - 1, 1), all = state.shown.length;
  const step = {ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -all, End: all}[event.key];
  if (step && (at === $("list") || event.key.startsWith("Arrow"))) { event.preventDefault(); openBeside(step); }
  if (event.key === "Enter" && state.selected !== null) { event.preventDefault(); $("main").focus(); }
});
const address = location.hash.slice(1);
showOverview();
filter();
if (/^\d+$/.test(address) && ENTRIES[address]) open(Number(address));
