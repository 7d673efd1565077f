// Choosing, the list of prompts, the keyboard, and the start.

function draw() {
  const group = DATA.groups[state.group];
  drawAbout(group);
  drawTree(group);
  redraw();
}

function redraw() {  // the text only
  drawText(DATA.groups[state.group], state.trajectory);
  keepAddress();
}

function show(index, id) {  // a group by its index, a trajectory by its id (default: the first that the filters want)
  const {trajectories} = DATA.groups[index], option = optionOf(index);
  const old = $("prompts").querySelector(".selected"), found = trajectories.find(t => t.trajectory_id === id);
  old?.classList.remove("selected");
  old?.setAttribute("aria-selected", "false");
  option.classList.add("selected");
  option.setAttribute("aria-selected", "true");
  reveal($("prompts"), option);
  $("prompts").setAttribute("aria-activedescendant", option.id);
  Object.assign(state, {group: index, trajectory: found ?? trajectories.find(fitsTrajectory) ?? trajectories[0]});
  draw();
  $("text").scrollTop = 0;
}

function showAddress() {
  const [index, id] = readAddress();
  filter();
  const shown = shownPrompts(), branches = k => numBranches(DATA.groups[k]);
  const mixed = shown.filter(k => DATA.groups[k].kind === "mixed").sort((a, b) => branches(b) - branches(a));
  const first = ($("sort").value ? null : mixed[0]) ?? shown[0] ?? 0;  // there is most to see
  show(DATA.groups[index] ? Number(index) : first, id);
}

function applyFilters() {  // stays at the prompt, where it fits
  filter();
  const shown = shownPrompts(), index = shown.includes(state.group) ? state.group : shown[0];
  if (index === undefined) return keepAddress();
  show(index, index === state.group && fitsTrajectory(state.trajectory) ? state.trajectory.trajectory_id : undefined);
}

function fillPrompts() {
  $("prompts").append(...DATA.groups.map((group, i) => el("div", {class: "prompt", role: "option", id: `prompt-${i}`,
    "aria-selected": "false", onclick: () => { show(i); if (isPhone()) $("about").scrollIntoView(); }},
    prose("div", {class: "question"}, group.question),
    el("div", {class: "facts small"},
      el("b", {}, span("hidden-words", "mean reward "), fixed(group.mean_reward)), span(`kind ${group.kind}`, group.kind),
      el("span", {class: "strip", "aria-hidden": "true"}, ...group.trajectories.map(t => el("i", {class: {"✓": "good", "✗": "bad"}[verdict(t)] ?? sign(t.reward)})))))));
}

function writeTotals() {
  const num = test => count(DATA.groups, test), numTrajectories = DATA.groups.flatMap(g => g.trajectories).length;
  document.title = $("title").textContent = DATA.title;
  $("totals").textContent = `${DATA.groups.length} prompts, ${numTrajectories} trajectories; prompts: `
    + `${num(g => g.kind === "mixed")} mixed, ${num(g => g.kind === "dead")} dead, ${num(isBranched)} with branches`;
  if (DATA.num_groups > DATA.groups.length) {
    $("cut").textContent = `only the first ${DATA.groups.length} of ${DATA.num_groups} prompts: raise --max_groups`;
  }
}

// ---- the keyboard

function neighbour(items, current, by) {  // stays at the ends
  const at = items.indexOf(current);
  return at < 0 ? items[0] : items[Math.min(Math.max(at + by, 0), items.length - 1)];
}

function nextPrompt(by) {
  const index = neighbour(shownPrompts(), state.group, by);
  if (index !== undefined) show(index);
}

function nextTrajectory(by) {
  const rows = treeOrder(DATA.groups[state.group]).map(([t]) => t.trajectory_id);
  show(state.group, neighbour(rows, state.trajectory.trajectory_id, by));
}

function nextColour() {
  const names = COLOURS.map(([name]) => name);
  state.colour = names[(names.indexOf(state.colour) + 1) % names.length];
  redraw();
}

const PANELS = ["prompts", "rows", "text"];  // Enter goes along them, Escape back

function goPanel(by) {
  const at = PANELS.findIndex(id => $(id).contains(document.activeElement));
  $(PANELS[Math.min(Math.max((at < 0 ? 0 : at) + (at < 0 ? 0 : by), 0), PANELS.length - 1)]).focus();
}

const press = id => () => $(id).disabled || $(id).click();
const COMMANDS = {
  ArrowDown: () => nextPrompt(1), ArrowUp: () => nextPrompt(-1), ArrowRight: () => nextTrajectory(1),
  ArrowLeft: () => nextTrajectory(-1), "/": () => $("find").focus(), p: press("previous"), n: press("next"),
  c: nextColour, t: () => { $("trend").open = !$("trend").open; }, "?": () => $("help").showModal(),
  Enter: () => goPanel(1), Escape: () => goPanel(-1),
};

document.addEventListener("keydown", event => {
  const {key, target} = event, isTyping = target.type === "search";
  if (!DATA || $("help").open || event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(COMMANDS, key)) return;
  if (["number", "select-one"].includes(target.type) && key !== "Escape") return;
  if (isTyping && !["ArrowDown", "ArrowUp", "Escape"].includes(key)) return;
  if (key === "Enter" && !PANELS.some(id => target === $(id))) return;  // of buttons and links
  const vertical = {ArrowDown: 1, ArrowUp: -1}[key];
  if (vertical && $("text").contains(target)) return;  // there it scrolls
  if (vertical && $("rows").contains(target)) nextTrajectory(vertical);
  else COMMANDS[key]();
  event.preventDefault();
});

async function start() {
  if (!window.DecompressionStream) {
    $("title").textContent = "this browser is too old to unpack the page (it has no DecompressionStream)";
    return;
  }
  DATA = await unpack();
  const turnsOf = group => group.trajectories.flatMap(t => t.turns), turns = DATA.groups.flatMap(turnsOf);
  for (const group of DATA.groups) {  // of those that were chosen by a score, the highest first
    turnsOf(group).map(turn => turn.decision).filter(d => isNumber(d?.score)).sort((a, b) => b.score - a.score)
      .forEach((d, i) => { d.rank = i + 1; });
  }
  hottest.turn = RUN.entropy ?? highest(turns.map(turn => turn.entropy), 1);  // one scale for all pages of a run
  hottest.entropy = RUN.entropy ? 2 * RUN.entropy : highest(turns.flatMap(turn => turn.entropies ?? []), 1);
  hottest.seconds = highest(turns.flatMap(turn => turn.tool_calls).map(call => call.seconds), 1);
  writeTotals();
  drawSteps();
  drawTrend();
  fillFilters();
  fillPrompts();
  FILTERS.forEach(id => $(id).addEventListener("input", applyFilters));
  $("clear").addEventListener("click", () => { FILTERS.forEach(id => { $(id).value = ""; }); applyFilters(); });
  $("keys").addEventListener("click", () => $("help").showModal());
  const fold = () => { $("filters").open = !isPhone(); };
  window.addEventListener("resize", () => { fold(); draw(); });
  fold();
  window.addEventListener("hashchange", showAddress);
  showAddress();
}
start().catch(error => {  // never a blank page
  $("title").textContent = `this page cannot be drawn: ${error}`;
  throw error;
});
