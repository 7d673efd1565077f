// The panels of a prompt and of a trajectory: facts, plot of the decisions, texts with coloured tokens.

function drawSignal(group) {  // P(branch) over H - H_root of all decisions of the dump; those of this group stand out
  const decisions = g => g.trajectories.flatMap(t => t.turns).map(turn => turn.decision)
    .filter(d => d && isNumber(d.probability) && isNumber(d.entropy) && isNumber(d.root_entropy));
  const own = new Set(decisions(group)), all = DATA.groups.flatMap(decisions);
  if (!all.length) return null;
  const delta = d => d.entropy - d.root_entropy, low = Math.min(0, ...all.map(delta));
  const high = Math.max(0, ...all.map(delta)), x = value => 30 + 200 * (value - low) / (high - low || 1);
  const y = probability => 64 - 56 * probability;
  const text = (left, top, words, anchor = "start") =>
    svg("text", {x: left, y: top, class: "small soft", "text-anchor": anchor}, words);
  const [lowest, highest] = [short(low, 2), short(high, 2)];
  const isFree = x(0) - 4 > 30 + widthOf(lowest, true) + 6 && x(0) + 4 < 230 - widthOf(highest, true) - 6;
  const label = `P(branch) over the change of entropy of ${all.length} decisions, ${own.size} of them of this prompt`;
  return svg("svg", {id: "signal", width: 300, height: 80, role: "img", "aria-label": label},
    svg("path", {class: "link", d: `M30 8 V64 H230 M${x(0)} 8 V64`}), text(4, 14, "P 1"), text(13, 66, "0"),
    text(30, 77, lowest), text(x(0), 77, isFree ? "0" : "", "middle"), text(230, 77, highest, "end"),
    text(240, 66, "ΔH, nats"),
    ...[...all].sort((a, b) => own.has(a) - own.has(b)).map(d => svg("circle", {cx: x(delta(d)), cy: y(d.probability),
      r: own.has(d) ? 3.5 : 2, class: own.has(d) ? OUTCOMES[d.outcome]?.[1] : "other"},
      svg("title", {}, decisionRecord(d)))));
}

function choice(id, label, options, value, onchange) {  // a labelled select; options: [[value, words]]
  const select = el("select", {id, onchange: event => { onchange(event.target.value); $(id).focus(); }},
    ...options.map(([name, words]) => el("option", {value: name}, words)));
  select.value = value;
  return el("label", {}, span("soft", label + " "), select);
}

function drawAbout(group) {
  const all = group.trajectories, turns = all.flatMap(t => t.turns.filter(turn => !turn.inherited));
  const calls = turns.flatMap(turn => turn.tool_calls);
  const decided = name => count(turns, turn => turn.decision?.outcome === name);
  const branches = count(all, t => t.parent_id !== null);
  const scales = [["turns", "turns"], ["tokens", "tokens"]];
  const told = el("div", {id: "told"}, prose("h2", {}, group.question),
    el("div", {class: "facts"}, span("soft", "answers "),
      ...group.answers.flatMap((answer, i) => [i ? "|" : "", el("bdi", {}, plain(answer))]).filter(Boolean),
      span("soft", group.prompt_id), span("soft", group.data_source)),
    el("details", {class: "small"}, el("summary", {}, "what the model was asked"),
      ...[...group.messages].map(m => el("pre", {dir: "auto"}, `${m.role}: ${plain(m.content)}`))),
    el("div", {class: "facts soft", id: "facts"}, ...[
      `mean reward ${short(group.mean_reward)}`, group.kind, `${all.length - branches} roots + ${branches} branches`,
      "decisions: " + Object.keys(OUTCOMES).map(name => `${decided(name)} ${name}`).join(", "),
      `${calls.length} tool calls, ${count(calls, c => !c.ok)} failed, ${count(calls, c => c.cached)} cached`,
    ].map(words => span("", words))),
    el("div", {class: "facts small"},
      choice("scale", "x axis", scales, state.scale, value => { state.scale = value; draw(); }),
      span("", "entropy H: 0 ", span("scale"), ` ${short(hottest.turn)} nats or more`),
      state.scale === "turns" ? span("", span("key waited"), `tool time to ${seconds(hottest.seconds)}`) : null,
      span("soft", "P(branch), or score:"),
      ...Object.entries(OUTCOMES).map(([name, [symbol, colour]]) => span(colour, `${symbol} ${name}`))));
  $("about").replaceChildren(...[told, drawSignal(group)].filter(Boolean));
}

// ---- tokens

const COLOURS = [["none", "not at all"], ["logprob", "by logprob"], ["entropy", "by entropy"]];

function ownerOf(group, t, index) {  // the trajectory that sampled a turn: a branch took it over from an ancestor
  const seen = new Set();  // of damaged dumps: parents in a circle, or with fewer turns
  for (let owner = t; owner?.turns[index] && !seen.has(owner); owner = parentOf(group, owner)) {
    if (!owner.turns[index].inherited) return owner;
    seen.add(owner);
  }
  return t;
}

// How unlikely or uncertain a token was, as a word for the underline: colour alone would not do for everybody.
const degree = share => share >= 0.6 ? "much" : share >= 0.2 ? "some" : "";

function tokenNodes(group, t, index) {  // the text of a turn, a span for each token; null where it has no tokens' texts
  const turn = ownerOf(group, t, index).turns[index], nodes = [];
  if (state.colour === "none" || !turn.chars?.length || turn.text.length > MOST_SHOWN) return null;
  let at = turn.text.length - turn.chars.reduce((sum, size) => sum + size, 0);
  if (at > 0) nodes.push(plain(turn.text.slice(0, at)));  // what the prompt opened
  turn.chars.forEach((size, i) => {
    const logprob = turn.logprobs[i], entropy = turn.entropies[i], piece = turn.text.slice(at, at += size);
    if (!size) return;
    const value = state.colour === "entropy" ? entropy : isNumber(logprob) ? -logprob : null, end = hottest[state.colour];
    const title = `token ${turn.start + i}: logprob ${fixed(logprob, 3)}`
      + (isNumber(logprob) ? ` (P ${fixed(Math.exp(logprob))})` : "")
      + (isNumber(entropy) ? `, entropy ${fixed(entropy, 3)} nats` : "");
    nodes.push(isNumber(value)
      ? el("span", {class: `token ${degree(value / end)}`, style: `background: ${heatOf(value, end)}`, title}, plain(piece))
      : el("span", {class: "token", title}, plain(piece)));
  });
  return nodes;
}

function legend(t) {
  if (state.colour === "none") return null;
  if (!t.turns.some((turn, i) => ownerOf(DATA.groups[state.group], t, i).turns[i].chars?.length)) {
    return span("warn", "this dump does not say which characters a token has");
  }
  const end = hottest[state.colour], [low, high] = state.colour === "logprob" ? ["0", `−${short(end)}`] : ["0", short(end)];
  const beyond = state.colour === "logprob" ? "nats and below" : "nats and above";
  const some = short(end * 0.2, 2), much = short(end * 0.6, 2), minus = state.colour === "logprob" ? "−" : "";
  return span("", `${state.colour} of the token: ${low} `, span("scale"), ` ${high} ${beyond}; `,
    span("token some", `${minus}${some}`), " ", span("token much", `${minus}${much}`), " and beyond are underlined",
    state.colour === "entropy" ? span("soft", "; recorded for the first tokens of each turn only") : null);
}

// ---- two trajectories side by side

function divergence(t, other) {  // [turn, "text" or "result_text", character] from which on they differ; null: nowhere
  for (let i = 0; i < Math.max(t.turns.length, other.turns.length); i++) {
    for (const part of ["text", "result_text"]) {
      const a = t.turns[i]?.[part] ?? "", b = other.turns[i]?.[part] ?? "";
      if (a === b) continue;
      let at = 0;
      while (at < a.length && a[at] === b[at]) at++;
      return [i, part, at];
    }
  }
  return null;
}

const AROUND = 60, SHOWN = 600;  // characters before the difference, and after it

function difference(t, other) {  // [turn of t after which it is shown, element]
  const found = divergence(t, other), name = `trajectory ${other.trajectory_id}`;
  if (!found) return [t.turns.length - 1, el("div", {class: "other small"}, `${name} has the same text`)];
  const [index, part, at] = found, where = part === "text" ? `turn ${index}` : `the result of turn ${index}`;
  const line = who => {
    const text = who.turns[index]?.[part] ?? "", from = Math.max(at - AROUND, 0);
    return el("pre", {dir: "auto"}, el("b", {}, `${who.trajectory_id} `), span("soft", (from ? "…" : "") + plain(text.slice(from, at))),
      el("mark", {}, plain(text.slice(at, at + SHOWN)) || "(ends here)"), at + SHOWN < text.length ? "…" : "");
  };
  return [Math.min(index, t.turns.length - 1), el("div", {class: "other", id: "difference"},
    el("div", {class: "small"}, `${name} differs from character ${at} of ${where} on`), line(t), line(other))];
}

// ---- the trajectory

function drawTurn(group, t, turn, index) {
  const d = turn.decision, calls = turn.tool_calls;
  const text = el("pre", {dir: "auto"}, ...(tokenNodes(group, t, index) ?? words(turn.text)));
  const body = el("div", {class: "body"}, text);
  const chip = el("span", {class: "chip", style: `background: ${heat(turn.entropy)}`}, `H ${short(turn.entropy, 4)}`);
  const side = el("div", {class: "small"}, el("h3", {}, `turn ${index} `), chip,
    el("div", {class: "soft"}, `tokens ${turn.start}–${turn.end}` + (turn.inherited ? `, from ${t.parent_id}` : "")),
    d ? el("div", {class: `record ${OUTCOMES[d.outcome]?.[1]}`}, decisionRecord(d)) : null);
  for (const call of calls) {
    const [words, colour] = callStatus(call), size = turn.result_end - turn.end, isLast = call === calls.at(-1);
    const note = !isLast ? "" : size ? `${size} tokens, no loss` : "the model read no result";
    body.append(el("div", {class: "masked small"},
      el("b", {}, call.tag), " ", span(colour, words), ` ${seconds(call.seconds)} `, span("soft", note)));
    if (call.result) body.append(prose("pre", {class: "masked"}, call.result));  // one that the model never read
  }
  if (turn.result_text) body.append(prose("pre", {class: "masked"}, turn.result_text));
  return el("div", {class: "turn" + (turn.inherited ? " inherited" : ""), id: "turn-" + index}, side, body);
}

// Its tokens from left to right: -logprob of each as a bar, entropy as a line where it was measured (the first tokens of
// a turn), results as bands, and a mark where others left it. It is the picture in which ARPO found its branch points.
function drawTrack(group, t) {
  const width = Math.max($("text").clientWidth - 30, 200), height = 64, base = 50, perToken = width / Math.max(t.num_tokens, 1);
  const x = token => token * perToken, y = (value, end) => base - (base - 6) * Math.min(value / end, 1), shapes = [];
  t.turns.forEach((turn, index) => {
    const owner = ownerOf(group, t, index), own = owner.turns[index], logprobs = own.logprobs ?? [];
    const bars = logprobs.map((value, i) => isNumber(value) && value < -0.005
      ? `M${x(turn.start + i + 0.5).toFixed(1)} ${base}V${y(-value, hottest.logprob).toFixed(1)}` : "").join("");
    const measured = (own.entropies ?? []).map((value, i) => [x(turn.start + i + 0.5), value]).filter(([, h]) => isNumber(h));
    const line = measured.map(([at, h], i) => `${i ? "L" : "M"}${at.toFixed(1)} ${y(h, hottest.entropy).toFixed(1)}`).join("");
    const select = () => reveal($("text"), $("turn-" + index)), calls = turn.tool_calls.map(call => call.tag).join(", ");
    if (turn.result_end > turn.end) shapes.push(svg("rect", {class: "tool", x: x(turn.end), y: 4, height: base - 4,
      width: x(turn.result_end) - x(turn.end), onclick: select}, svg("title", {}, `turn ${index}: result of ${calls}`)));
    shapes.push(svg("path", {class: "bars", d: bars, "stroke-width": Math.min(Math.max(perToken * 0.7, 0.5), 5)}));
    if (line) shapes.push(svg("path", {class: "entropy", d: line}));
    const forks = count(group.trajectories, other => other.parent_id === owner.trajectory_id && other.fork_at === turn.start);
    if (own.decision) shapes.push(svg("text", {class: `small ${OUTCOMES[own.decision.outcome]?.[1]}`, x: x(turn.start), y: height - 2},
      mark(own.decision) + (forks ? ` ${forks} left` : "")));
  });
  const label = `${t.num_tokens} tokens of trajectory ${t.trajectory_id}: -logprob as bars, entropy as a line, results as bands`;
  return el("figure", {id: "track"}, el("figcaption", {class: "small soft"}, el("span", {class: "key bars"}, "−logprob "),
    el("span", {class: "key entropy"}, "entropy, first tokens of a turn "), el("span", {class: "key tool"}, "result of a call")),
    svg("svg", {width, height, role: "img", "aria-label": label},
      svg("path", {class: "axis", d: `M0 ${base}H${width}`}), ...shapes));
}

function drawText(group, t) {
  const parts = Object.entries(t.reward_parts).map(([name, value]) => `${name} ${short(value)}`).join(", ") || "-";
  const facts = {reward: `${short(t.reward)} (${parts})`, reason: t.reward_reason || "ok",
    advantage: short(t.advantage), "KL penalty": short(t.kl_penalty), stop: t.stop_reason,
    tokens: `${t.num_tokens}, ${t.num_sampled} sampled`, "mean logprob": short(t.mean_logprob)};
  if (t.sampled_in.length) facts["tokens of step"] = t.sampled_in.map(([step, n]) => `${step}: ${n}`).join(", ");
  if (t.grade) Object.assign(facts, {answer: plain(t.grade.prediction || "none"), "graded by": t.grade.metric});
  const turns = t.turns.map((turn, index) => [drawTurn(group, t, turn, index)]);
  const fork = el("div", {class: "fork small"}, `leaves trajectory ${t.parent_id} at token ${t.fork_at}`);
  const others = group.trajectories.filter(other => other !== t).map(other => other.trajectory_id);
  const other = group.trajectories.find(one => one !== t && one.trajectory_id === state.compare);
  if (other) {
    const [after, shown] = difference(t, other);
    turns[after].push(shown);
  }
  for (const index of t.new_contexts) {
    turns[index].unshift(el("div", {class: "fork small"}, t.turns[index - 1].is_note
      ? "a new context: the question, with this note" : "a new context: not all that stands above was read from here on"));
  }
  if (t.parent_id !== null && forkTurn(t) < turns.length) turns[forkTurn(t)].unshift(fork);
  $("text").replaceChildren(el("div", {class: "facts", id: "trajectory"}, el("h2", {}, `trajectory ${t.trajectory_id}`),
    ...Object.entries(facts).map(([name, value]) => span("", span("soft", name + " "), String(value)))),
    el("div", {class: "facts small", id: "view"},
      choice("colour", "colour tokens", COLOURS, state.colour, value => { state.colour = value; redraw(); }),
      others.length ? choice("compare", "compare with", [["", "none"], ...others.map(id => [id, id])], other ? state.compare : "",
        value => { state.compare = value; redraw(); }) : null,
      legend(t)),
    drawTrack(group, t),
    ...(t.grade?.judge_reply ? [el("details", {class: "small"}, el("summary", {}, "what the judge said"),
      prose("pre", {}, t.grade.judge_reply))] : []),
    ...turns.flat());
}
