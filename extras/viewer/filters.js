// Which prompts and trajectories are shown, and the address that keeps it.
const FILTERS = ["find", "kind", "stop", "reason", "tool", "low", "high", "sort"];
const numBranches = group => count(group.trajectories, t => t.parent_id !== null && !repeats(group, t));
const most = (group, of) => Math.max(...group.trajectories.map(of));
const SORTS = {  // what stands first has the highest
  worst: group => -(group.mean_reward ?? Infinity), best: group => group.mean_reward ?? -Infinity, branches: numBranches,
  entropy: group => most(group, t => Math.max(...t.turns.map(turn => finite(turn.entropy)))),
  tokens: group => most(group, t => t.num_tokens),
  wait: group => most(group, t => t.turns.flatMap(turn => turn.tool_calls).reduce((sum, call) => sum + finite(call.seconds), 0)),
};
let haystacks = [];  // of each group, all its text in lower case

const isBranched = group => group.trajectories.some(t => t.parent_id !== null);
const reasonOf = t => t.reward_reason || "ok";
const failuresOf = t => t.turns.flatMap(turn => turn.tool_calls).filter(call => !call.ok)
  .flatMap(call => [call.tag, `${call.tag}: ${call.error_kind ?? "failed"}`]);

function fitsTrajectory(t) {  // one trajectory has to fit all three, not each of them another one
  const [stop, reason, tool] = ["stop", "reason", "tool"].map(id => $(id).value);
  return (!stop || String(t.stop_reason) === stop) && (!reason || reasonOf(t) === reason)
    && (!tool || failuresOf(t).includes(tool));
}

function fitsGroup(group, i) {
  const words = $("find").value.toLowerCase(), kind = $("kind").value, [low, high] = [$("low").value, $("high").value];
  return haystacks[i].includes(words)
    && (!kind || group.kind === kind || (kind === "branched" && isBranched(group)))
    && (low === "" || group.mean_reward >= low) && (high === "" || group.mean_reward <= high)
    && group.trajectories.some(fitsTrajectory);
}

function fillFilters() {  // options with the number of trajectories that have them, the commonest first
  const all = DATA.groups.flatMap(group => group.trajectories);
  const fill = (id, wordsOf) => {
    const counts = new Map();
    for (const t of all) for (const word of new Set(wordsOf(t))) counts.set(word, (counts.get(word) ?? 0) + 1);
    const sorted = [...counts].sort(([a, n], [b, m]) => m - n || (a < b ? -1 : 1));
    $(id).append(...sorted.map(([word, n]) => el("option", {value: word}, `${plain(word)} (${n})`)));
  };
  fill("stop", t => [String(t.stop_reason)]);
  fill("reason", t => [reasonOf(t)]);
  fill("tool", failuresOf);
  const failed = [...$("tool").options].slice(1);
  failed.forEach(option => { option.textContent = "failed " + option.textContent; });
  for (const option of $("kind").options) {
    const n = count(DATA.groups, g => g.kind === option.value || (option.value === "branched" && isBranched(g)));
    if (option.value) option.textContent += ` (${n})`;
  }
  haystacks = DATA.groups.map(g => [g.question, g.prompt_id, ...g.answers,
    ...g.trajectories.flatMap(t => t.turns.map(turn => turn.text + turn.result_text))].join("\n").toLowerCase());
}

const optionOf = index => $(`prompt-${index}`);
const shownPrompts = () => [...$("prompts").children].filter(option => !option.hidden).map(option => Number(option.id.slice(7)));

function filter() {
  const fitting = DATA.groups.map(fitsGroup), key = SORTS[$("sort").value] ?? (() => 0), keys = DATA.groups.map(key);
  const order = [...DATA.groups.keys()].sort((a, b) => keys[b] - keys[a] || a - b);
  $("prompts").append(...order.map(optionOf));
  fitting.forEach((fits, i) => { optionOf(i).hidden = !fits; });
  const isFiltered = FILTERS.some(id => $(id).value !== ""), groups = DATA.groups.filter((_, i) => fitting[i]);
  const matching = count(groups.flatMap(g => g.trajectories), fitsTrajectory);
  $("count").textContent = `${groups.length} of ${DATA.groups.length} prompts`
    + (["stop", "reason", "tool"].some(id => $(id).value) ? `, ${matching} trajectories` : "");
  $("clear").hidden = !isFiltered;
}

// ---- the address: #GROUP/TRAJECTORY&find=...&colour=..., to keep or to share

function settings() {  // what stays the same when one goes to another step
  const values = FILTERS.map(id => [id, $(id).value]);
  values.push(["colour", state.colour === "none" ? "" : state.colour], ["compare", state.compare]);
  values.push(["scale", state.scale === "turns" ? "" : state.scale]);
  const kept = new URLSearchParams(values.filter(([, value]) => value !== "")).toString();
  return kept && "&" + kept;
}

function keepAddress() {
  history.replaceState(null, "", `#${state.group}/${state.trajectory.trajectory_id}${settings()}`);
}

function readAddress() {  // into the filters and the state; returns [group, trajectory id]
  const [place, ...rest] = location.hash.slice(1).split("&"), given = new URLSearchParams(rest.join("&"));
  const [, index, id] = decodeURIComponent(place).match(/^(\d+)\/(.*)$/) ?? [];
  FILTERS.forEach(name => { $(name).value = given.get(name) ?? ""; });
  for (const name of ["kind", "stop", "reason", "tool", "sort"]) {
    const value = given.get(name) ?? "";  // of another step, which this one does not have: shown as such, not dropped
    if ($(name).value !== value) {
      $(name).append(el("option", {value}, `${plain(value)} (0)`));
      $(name).value = value;
    }
  }
  state.colour = COLOURS.some(([name]) => name === given.get("colour")) ? given.get("colour") : "none";
  state.scale = given.get("scale") === "tokens" ? "tokens" : "turns";
  state.compare = given.get("compare") ?? "";
  document.body.classList.toggle("poster", given.has("poster"));  // the tree alone, for a picture
  return [index, id];
}
