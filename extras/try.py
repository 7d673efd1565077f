"""Runs a custom function over a dump of a run, and prints the results. Needs no model and no GPU, and takes seconds.

    python -m extras.try my_rules.py:spikes runs/NAME/trajectories/step_000010.jsonl.gz

The function is a branching rule or a retrospective selector (branching.selector), an estimator (advantage.kind), a tree
credit (advantage.tree) or a reward (reward.file). The results are checked as in a training: types, lengths, ranges,
finite numbers. The function's config section has the values of the dump's run.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import random
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from arpo.advantages import GroupEvidence, assign_advantages, token_advantages
from arpo.branching import Evidence, decide
from arpo.config.exits import exit_with
from arpo.config.named import find, is_own
from arpo.errors import UserError, printable
from arpo.evals import mean
from arpo.log.dumps import read_dump
from arpo.log.settings import begun_settings
from arpo.options import AdvantageConfig, BranchingConfig, is_retrospective
from arpo.retrospective import chosen_forks
from arpo.rewards.custom import ALL, ONE, custom_results, load_custom
from arpo.selection import trained_on
from arpo.start.trial import evidence_of
from arpo.trajectory import Group, Prompt, Trajectory

OPTIONS = ("branching.selector", "advantage.kind", "advantage.tree", "reward.file")
RULE_NAMES = {field.name for field in fields(Evidence)} | {"delta_entropy"}
ESTIMATOR_NAMES = {field.name for field in fields(GroupEvidence)} - {"trajectories"}
NUM_SHOWN = 5
"""Number of single results to print."""
Lines = Iterator[str]


def report(value: str, dump: Path, option: str = "", budget: int = 0) -> list[str]:
    """Return the results of a function, FILE.py:NAME, for a dump. option: the function's option; "" = read off the
    function.

    budget: most forks of a retrospective selector in a group; 0 = the number of branches of the group in the dump, or
    half the number of its roots. Raises UserError.
    """
    if not is_own(value):
        raise UserError(f"{value}: name a function as FILE.py:NAME")
    function = find("extras.try", value, {})
    if not callable(function):
        raise UserError(f"{value} is no function")
    option, groups = option or option_of(value, function), groups_of(dump)
    num_trajectories = sum(len(group.trajectories) for group in groups)
    head = f"{value} as {option} on {dump}: {len(groups)} prompts, {num_trajectories} trajectories"
    branching, advantage = (of_run(dump, section) for section in (BranchingConfig, AdvantageConfig))
    if option == "reward.file":
        return [head, *try_reward(value, groups)]
    if option == "branching.selector":
        cfg = replace(branching, selector=value)
        return [head, *(try_selector(groups, cfg, budget) if is_retrospective(value) else try_rule(groups, cfg))]
    if option == "advantage.kind":
        return [head, *try_estimator(groups, replace(advantage, kind=value, tree="soft"))]
    return [head, *try_credit(groups, replace(advantage, tree=value))]


def option_of(value: str, function: Callable) -> str:
    """Return a function's option, by the names and types of the parameters, and by the attributes read in the code."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    names = tuple(p.name for p in parameters)
    first = parameters[0] if parameters else None
    if len(names) != 2 or names in (ONE, ALL):
        return "branching.selector" if names[:1] == ("group",) else "reward.file"
    kind = getattr(first.annotation, "__name__", str(first.annotation)).rpartition(".")[2]
    by_type = {"Evidence": OPTIONS[0], "GroupEvidence": OPTIONS[1], "Group": OPTIONS[2]}
    looks_at = _attributes_of(function, first.name)
    if kind in by_type:
        return by_type[kind]
    if first.name == "group":
        return "advantage.tree"
    if bool(looks_at & RULE_NAMES) != bool(looks_at & ESTIMATOR_NAMES):
        return OPTIONS[0] if looks_at & RULE_NAMES else OPTIONS[1]
    raise UserError(f"{value} takes ({', '.join(names)}), as several do; say --as {' or '.join(OPTIONS[:3])}")


def _attributes_of(function: Callable, name: str) -> set[str]:
    """Return the attributes of parameter `name` read by a function; empty if the source is not available."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return set()
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    return {node.attr for node in found if node.value.id == name}


def groups_of(dump: Path) -> list[Group]:
    """Return the groups of a dump. Raises UserError for an empty or damaged dump."""
    groups: list[Group] = []
    for place, trajectory, row in read_dump(dump):
        group = groups[-1] if groups else None
        known = {t.trajectory_id for t in group.trajectories} if group else ()
        # One prompt may come twice in a step: a repeated path starts the next group.
        if group is None or group.prompt.prompt_id != trajectory.prompt_id or trajectory.trajectory_id in known:
            try:
                prompt = Prompt(trajectory.prompt_id, row["messages"], row["answers"], row["data_source"])
            except KeyError as error:
                raise UserError(f"{place}: no {error} beside the trajectory; take a dump of a training") from None
            groups.append(group := Group(prompt, []))
        group.trajectories.append(trajectory)
    if not groups:
        raise UserError(f"{dump}: the dump is empty; choose another")
    return groups


def of_run(dump: Path, section: type) -> Any:
    """Return a config section of the dump's run; the defaults if the dump is not in the folder of a run."""
    prefix = section.__name__.removesuffix("Config").lower()
    settings = begun_settings(dump.resolve().parent.parent)
    names = {field.name for field in fields(section)} - {"selector", "kind", "tree"}
    return section(**{name: settings[f"{prefix}.{name}"] for name in names if f"{prefix}.{name}" in settings})


# ---- each kind of function


def try_rule(groups: Sequence[Group], cfg: BranchingConfig) -> Lines:
    """Judge each tool result with a possible branch."""
    found = []
    recorded = Counter()
    num_unmeasured = 0
    for t in (t for group in groups for t in group.trajectories):
        own = [number for number, turn in enumerate(t.turns) if not turn.inherited]
        for number in own[1:]:  # a branch's first own turn was judged at the parent; a root's follows no result
            turn = t.turns[number]
            if turn.entropy is None or not turn.token_entropies:
                num_unmeasured += 1
                continue
            evidence = evidence_of(t, number, turn.decision.consecutive if turn.decision else 0)
            _, probability, _ = decide(evidence, cfg, random.Random(0))
            recorded += Counter([turn.decision.outcome] if turn.decision else [])
            found.append((probability, evidence, t, number))
    if not found:
        raise UserError("no tool result of the dump can be judged: no turn after one has recorded entropies")
    chances = [probability for probability, *_ in found]
    yield f"judged {len(found)} results: P {spread(chances)}; 0 at {chances.count(0.0)}, 1 at {chances.count(1.0)}"
    if num_unmeasured:
        yield f"not judged: {num_unmeasured} turns without recorded entropies"
    for failed in (False, True):
        some = [p for p, evidence, *_ in found if any(not call.ok for call in evidence.calls) == failed]
        if some:
            yield f"after calls that {'failed' if failed else 'succeeded'}: {len(some)}, mean P {mean(some):.3f}"
    if recorded:
        yield f"the run itself: {', '.join(f'{count} {outcome}' for outcome, count in recorded.most_common())}"
    for probability, evidence, t, number in found[:NUM_SHOWN]:
        calls = ", ".join(f"{call.tag} {'ok' if call.ok else call.error_kind}" for call in evidence.calls)
        yield f"  {place(t)}, turn {number} after {calls or 'no call'}: P {probability:.3f}"


def try_selector(groups: Sequence[Group], cfg: BranchingConfig, budget: int) -> Lines:
    """Choose forks of each group's roots, as in a first round."""
    forks = []
    num_asked = 0
    for group in groups:
        roots = [replace(t, reward=None, reward_parts={}) for t in group.trajectories if t.parent_id is None]
        wanted = budget or len(group.trajectories) - len(roots) or max(len(roots) // 2, 1)
        num_asked += wanted
        name = f"try|{group.prompt.prompt_id}"
        forks += [(group, fork) for fork in chosen_forks(Group(group.prompt, roots), wanted, cfg, random.Random(name))]
    yield f"chose {len(forks)} forks of {num_asked} that it was asked for; fresh roots would be the rest"
    if scores := [fork.score for _, fork in forks if fork.score is not None]:
        yield f"scores: {spread(scores)}"
    turns = Counter(fork.turn for _, fork in forks)
    yield f"turns that are sampled anew: {', '.join(f'turn {turn}: {turns[turn]}' for turn in sorted(turns)) or 'none'}"
    for group, fork in forks[:NUM_SHOWN]:
        score = "" if fork.score is None else f", score {fork.score:.4g}"
        yield f"  prompt {group.prompt.prompt_id}, trajectory {fork.trajectory_id}, turn {fork.turn}{score}"


def try_estimator(groups: list[Group], cfg: AdvantageConfig) -> Lines:
    """Compare the trajectories of the dump, all together, as a step does."""
    check_rewards(groups)
    assign_advantages(groups, cfg)
    taught = [t for group in groups for t in trained_on(group)]
    yield f"advantages of {len(taught)} trajectories: {spread([t.advantage for t in taught])}"
    for group in groups[:NUM_SHOWN]:
        pairs = ", ".join(f"{t.reward:.3g} -> {t.advantage:.3g}" for t in trained_on(group))
        yield f"  prompt {group.prompt.prompt_id}: reward -> advantage: {pairs}"


def try_credit(groups: list[Group], cfg: AdvantageConfig) -> Lines:
    """Share the advantages of each group's trajectories among their tokens."""
    check_rewards(groups)
    unknown = [group for group in groups if any(t.advantage is None for t in trained_on(group))]
    assign_advantages(unknown, replace(cfg, tree="soft"))  # the dump of a validation has no advantages
    rows = []
    for group in groups:
        credits = token_advantages(group, cfg.tree, cfg)
        for t in trained_on(group):
            values = [value for value, mask in zip(credits[t.trajectory_id], t.loss_mask, strict=True) if mask]
            rows.append((t, [float(value) for value in values]))
    values = [value for _, row in rows for value in row]
    if not values:
        raise UserError("no trajectory of the dump has a token to train on; take another dump")
    others = sum(abs(value - t.advantage) > 1e-6 for t, row in rows for value in row)
    yield f"credits of {len(values)} loss tokens in {len(rows)} trajectories: {spread(values)}"
    zeros = values.count(0.0) / len(values)
    yield f"0 at {zeros:.0%} of the tokens; other than the trajectory's advantage at {others / len(values):.0%}"
    for t, row in rows[:NUM_SHOWN]:
        yield f"  {place(t)}: advantage {t.advantage:.3g}, credits {spread(row) if row else 'of no token'}"


def try_reward(value: str, groups: Sequence[Group]) -> Lines:
    """Score each trajectory anew, and compare with the rewards of the dump."""
    pairs = [(t, group.prompt) for group in groups for t in group.trajectories]
    results = custom_results(load_custom("reward.file", value), pairs)
    totals = [result.total for result in results if result.total is not None]
    yield "a dump has question, answers and data source of a row, but not its other columns: extra_info is {}"
    yield f"scores of {len(totals)} trajectories: {spread(totals) if totals else 'none'}"
    if missing := Counter(result.reason for result in results if result.total is None):
        yield f"no reward: {', '.join(f'{count} {reason}' for reason, count in missing.most_common())}"
    for name in dict.fromkeys(name for result in results for name in result.parts):
        yield f"part {name}: {spread([result.parts[name] for result in results if name in result.parts])}"
    known = [(t.reward, r.total) for (t, _), r in zip(pairs, results, strict=True) if None not in (t.reward, r.total)]
    if known:
        yield f"other than the dump's reward: {sum(abs(a - b) > 1e-6 for a, b in known)} of {len(known)}"
    for (t, _), result in list(zip(pairs, results, strict=True))[:NUM_SHOWN]:
        yield f"  {place(t)}: {result.total}, {result.parts} {result.reason} (the dump: {t.reward})"


def check_rewards(groups: Iterable[Group]) -> None:
    """Raise UserError for a dump without rewards."""
    for t in (t for group in groups for t in trained_on(group)):
        if t.reward is None:
            raise UserError(f"{place(t)} has no reward in the dump; take a dump of a training's step")


def place(t: Trajectory) -> str:
    return f"prompt {t.prompt_id}, trajectory {t.trajectory_id}"


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}, mean {mean(values):.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.try", description=__doc__.splitlines()[0])
    parser.add_argument("function", metavar="FILE.py:NAME")
    parser.add_argument("dump", type=Path, metavar="DUMP", help="runs/NAME/trajectories/step_000010.jsonl.gz")
    parser.add_argument("--as", dest="option", choices=OPTIONS, default="", help="what the function is for")
    parser.add_argument(
        "--budget", type=int, default=0, help="forks that a retrospective selector may choose in a group"
    )
    args = parser.parse_args()
    try:
        for line in report(args.function, args.dump, args.option, args.budget):
            print(printable(line))
    except UserError as error:
        exit_with(error)


if __name__ == "__main__":
    main()
