// The tree of a group: one lane per trajectory, which begins where it leaves its parent.
const ROW = 42, HEAD = 22;  // pixels; the rows beside the tree and the lanes in it must agree
const END = 170;  // pixels for the answer at the end of a row
const NAMES = [76, 240];  // pixels for the names of trajectories: at least, and at most
const COLUMN = [150, 340];  // pixels of a turn: of four at 1400 pixels the answers are still in sight

const pen = document.createElement("canvas").getContext("2d");
function widthOf(words, isSmall, font = isSmall ? "10.5px" : "11.5px") {  // pixels, in the style's sizes
  pen.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(words).width;
}

const clamped = (value, [low, high]) => Math.min(Math.max(value, low), high);

const forkTurn = t => t.turns.filter(turn => turn.inherited).length;  // the first turn of its own
const parentOf = (group, t) => group.trajectories.find(other => other.trajectory_id === t.parent_id);

function treeOrder(group) {  // [[trajectory, depth]], parents first; late forks first: so no link crosses a lane
  const ids = new Set(group.trajectories.map(t => t.trajectory_id)), order = [];
  function visit(parent, depth) {
    const children = group.trajectories.filter(t => (ids.has(t.parent_id) ? t.parent_id : null) === parent);
    if (parent !== null) children.sort((a, b) => b.fork_at - a.fork_at);
    children.forEach(t => { order.push([t, depth]); visit(t.trajectory_id, depth + 1); });
  }
  visit(null, 0);
  const found = new Set(order.map(([t]) => t));  // of parents in a circle none is reached
  order.push(...group.trajectories.filter(t => !found.has(t)).map(t => [t, 0]));
  return order;
}

function pathOf(group, trajectory) {  // Map: id of it or an ancestor -> how many of that one's turns it consists of
  const path = new Map();
  for (let t = trajectory, upto = Infinity; t && !path.has(t.trajectory_id);) {
    path.set(t.trajectory_id, upto);
    upto = forkTurn(t);
    t = parentOf(group, t);
  }
  return path;
}

// A branch whose text is its parent's, letter by letter: it cost its tokens, and taught nothing.
const repeats = (group, t) => Boolean(parentOf(group, t)) && divergence(t, parentOf(group, t)) === null;

const MAX_ANSWER = 20000;  // characters at the end of a response in which its answer is looked for

function answerOf(t) {  // what it answered, as far as that can be told; "" = nothing
  const text = t.turns.at(-1)?.text.split("</think>").at(-1).slice(-MAX_ANSWER) ?? "", block = text.match(/<answer>([^]*?)(<\/answer>|$)/)?.[1];
  const boxes = [...(block ?? text).matchAll(/\\boxed\{([^]*?)\}(?![^{]*\})/g)];
  return (t.grade?.prediction ?? boxes.at(-1)?.[1] ?? block ?? "").replace(/\s+/g, " ").trim();
}
const rightness = t => t.reward_parts.accuracy ?? null;  // null: the reward does not say
const verdict = t => rightness(t) === null ? "" : rightness(t) > 0 ? "✓" : "✗";

const MOST_LETTERS = 200;  // of a cell, for which there is room

function cut(words, width, isSmall) {  // as much of it as fits
  if (words.length <= MOST_LETTERS && widthOf(words, isSmall) <= width) return words;
  let at = Math.min(words.length, MOST_LETTERS);
  while (at > 0 && widthOf(words.slice(0, at) + "…", isSmall) > width) at--;
  return words.slice(0, at).trimEnd() + "…";
}

const waited = calls => Math.max(...calls.map(call => finite(call.seconds)));  // for those of a turn, which run at once

function layout(group, width) {  // x(turn, index, part) in pixels; part 0 = start, 1 = end, 2 = end of the result
  if (state.scale === "turns") {
    const column = clamped(width / Math.max(1, ...group.trajectories.map(t => t.turns.length)), COLUMN);
    const sampled = Math.min(110, 0.5 * column);
    return (turn, index, part) => 14 + index * column + [0, sampled, column - 14][part];
  }
  const perToken = width / Math.max(1, ...group.trajectories.map(t => t.num_tokens));
  return (turn, index, part) => 14 + perToken * [turn.start, turn.end, turn.result_end][part];
}

function turnCells(group, t, turn, index, x, y, onPath) {
  const [left, middle, right] = [0, 1, 2].map(part => x(turn, index, part)), cells = [];
  const select = () => { show(state.group, t.trajectory_id); reveal($("text"), $("turn-" + index)); };
  const cell = (from, to, kind, style, title) => cells.push(svg("rect", {style, onclick: select,
    class: `cell ${kind} ${onPath ? "on-path" : ""}`, rx: 4, x: from, y: y + 4, width: Math.max(to - from, 1.5),
    height: ROW - 8}, svg("title", {}, plain(title))));
  const write = (from, to, line, kind, ...words) => {  // the first of the words that fit; none rather than a part
    const fitting = words.find(word => widthOf(word, kind.includes("small")) <= to - from - 8);
    if (fitting) cells.push(svg("text", {x: from + 6, y: y + 18 + 15 * line, class: kind}, fitting));
  };
  const d = turn.decision, calls = turn.tool_calls;
  cell(left, middle, "", `fill: ${heat(turn.entropy)}`,
    `turn ${index}: H ${short(turn.entropy, 4)}, ${turn.end - turn.start} tokens\n` + (d ? decisionRecord(d) : ""));
  write(left, middle, 0, "", `H ${fixed(turn.entropy, 3)}`, fixed(turn.entropy), fixed(turn.entropy, 1));
  if (d) {
    const chance = `${mark(d)} ${fixed(isForward(d) ? d.probability : d.score)}${d.rank ? ` #${d.rank}` : ""}`;
    write(left, middle, 1, `small ${d.outcome}`, `${chance} ${d.outcome}`, chance, mark(d));
  }
  if (calls.length) {  // several share the cell: what is said in a word is that of the worst
    const call = calls.find(one => !one.ok) ?? calls[0], [words, colour] = callStatus(call);
    const took = call.executed ? " " + seconds(waited(calls)) : "";
    const name = calls.length > 1 ? `${calls.length} calls` : call.tag;
    const said = plain(call.argument.slice(0, 200).replace(/\s+/g, " ").trim());
    const about = one => `${one.tag}: ${callStatus(one)[0]} ${one.executed ? seconds(one.seconds) : ""}\n`
      + one.argument.slice(0, 400);
    cell(middle + 2, right, "tool", "", calls.map(about).join("\n"));
    if (call.executed && state.scale === "turns") {  // there all cells are as wide, so that bars can be compared
      const share = Math.min(waited(calls) / hottest.seconds, 1);
      cells.push(svg("rect", {class: "waited", x: middle + 4, y: y + ROW - 8, height: 3, width: (right - middle - 6) * share}));
    }
    write(middle + 2, right, 0, "", cut(said, right - middle - 12, false));
    write(middle + 2, right, 1, `small ${colour}`, `${name} ${words}${took}`, `${name} ${words}`, name, call.ok ? "✓" : "✗");
  }
  if (turn.is_note) {
    write(middle + 2, right, 0, "", cut(plain(turn.text.replace(/\s+/g, " ").trim()), right - middle - 12, false));
    write(middle + 2, right, 1, "small soft", "note");
  }
  if (index === t.turns.length - 1) {
    const at = calls.length ? right : middle, ended = t.stop_reason === "eos" ? "" : String(t.stop_reason);
    const defect = plain(t.reward_reason || ended), answer = plain(answerOf(t)) || defect || "no answer";
    const colour = {"✓": "good", "✗": "bad"}[verdict(t)] ?? "";
    write(at, Infinity, 0, `soft outcome ${colour}`, `${verdict(t)} ${cut(answer, END - 30, false)}`.trim());
    write(at, Infinity, 1, "small soft", repeats(group, t) ? `same text as ${t.parent_id}` : answer === defect ? "" : defect);
  }
  return cells;
}

function treeRow(group, t, depth) {
  const chosen = t === state.trajectory, rest = fitsTrajectory(t) && !repeats(group, t) ? "" : "dim";
  const hasChildren = group.trajectories.some(other => other.parent_id === t.trajectory_id);
  return el("div", {class: `row ${chosen ? "selected" : ""} ${rest}`, style: `height: ${ROW}px`, role: "treeitem",
    id: `row-${t.trajectory_id}`, "aria-level": depth + 1, "aria-selected": chosen,
    "aria-expanded": hasChildren ? "true" : null, onclick: () => show(state.group, t.trajectory_id),
    "aria-label": `trajectory ${t.trajectory_id}, reward ${fixed(t.reward)}, advantage ${signed(t.advantage)}, `
      + `${t.num_tokens} tokens, stop ${t.stop_reason}`},
    el("b", {style: `padding-left: ${10 * depth}px`, title: t.trajectory_id}, t.trajectory_id),
    span(sign(t.reward), fixed(t.reward)),
    span(sign(t.advantage), signed(t.advantage)), span("soft", String(t.num_tokens)));
}

function drawTree(group) {
  const order = treeOrder(group), path = pathOf(group, state.trajectory), hadFocus = $("tree").contains(document.activeElement);
  const longest = Math.max(...order.map(([t, depth]) => 10 * depth + widthOf(t.trajectory_id, false, "600 14px")));
  const names = isPhone() ? 66 : Math.round(clamped(longest + 8, NAMES));
  $("tree").style.setProperty("--names", `${names}px`);
  const room = Math.max($("tree").clientWidth - names - (isPhone() ? 64 : 189) - END, 300), x = layout(group, room), y = i => HEAD + ROW * i;
  const lanes = new Map(order.map(([t], i) => [t.trajectory_id, y(i)]));
  const end = Math.max(0, ...group.trajectories.flatMap(t => t.turns.map((turn, i) => x(turn, i, 2)))) + END;
  const head = el("div", {class: "row soft small", style: `height: ${HEAD}px`, "aria-hidden": "true"},
    ...["trajectory", "reward", "adv.", "tokens"].map(name => span("", name)));
  const bands = [], links = [], cells = [];
  order.forEach(([t], i) => {
    const chosen = t === state.trajectory ? "selected" : "", onclick = () => show(state.group, t.trajectory_id);
    bands.push(svg("rect", {x: 0, y: y(i), width: end, height: ROW, class: `band ${chosen}`, onclick}));
    const fork = forkTurn(t), onPath = path.get(t.trajectory_id) ?? 0;
    if (lanes.has(t.parent_id) && fork < t.turns.length) {
      const at = x(t.turns[fork], fork, 0) - 12, from = lanes.get(t.parent_id) + ROW / 2;
      links.push(svg("path", {class: `link ${onPath ? "on-path" : ""}`, d: `M${at} ${from} h5 V${y(i) + ROW / 2} h7`,
        "data-link": `${t.parent_id} > ${t.trajectory_id}`}));
    }
    const own = t.turns.flatMap((turn, k) => turn.inherited ? [] : turnCells(group, t, turn, k, x, y(i), k < onPath));
    cells.push(svg("g", fitsTrajectory(t) && !repeats(group, t) ? {} : {class: "dim"}, ...own));
  });
  const rows = el("div", {id: "rows", role: "tree", tabindex: "0", "aria-label": "trajectories of the prompt",
    "aria-activedescendant": `row-${state.trajectory.trajectory_id}`},
    ...order.map(([t, depth]) => treeRow(group, t, depth)));
  // What the drawing says of each turn, the text says in words.
  $("tree").replaceChildren(el("div", {id: "lanes"}, head, rows),
    svg("svg", {width: end, height: y(order.length), "aria-hidden": "true"}, ...bands, ...links, ...cells));
  if (hadFocus) rows.focus({preventScroll: true});
  reveal($("tree"), document.querySelector(".row.selected"));
}
