"""Two steps of train_rl.py on two ranks with each algorithm, every part real: it runs, and its numbers are finite.

What the algorithms compute is tested in test_losses.py and test_update.py.
"""

import functools
import math
import shutil
from collections.abc import Iterator

import pytest
from helpers.files import read_jsonl
from helpers.models import searching_model
from helpers.option_reads import record_reads
from helpers.ranks import run_script
from helpers.saving import tensors_of
from helpers.toy_run import build_toy_world

from arpo.config.facts import Needs, facts_of, leaves, of_kind
from arpo.log import read_metrics
from arpo.start.load import load_config
from evaluate import EvalConfig
from train_rl import RLConfig
from train_sft import SFTConfig

pytestmark = pytest.mark.slow  # each run takes about eight seconds of computing

SHORT = ["--run.num_steps", "2", "--run.validate_every", "0", "--run.save_every", "0", "--run.save_hf_every", "0"]
SEARCHES = ["--model.path", "@WORLD@/searcher", "--optim.lr", "1e-3", "--rollout.max_response_tokens", "160",
            "--rollout.max_result_tokens", "40", "--update.max_tokens_per_microbatch", "512"]  # fmt: skip
"""A model that calls a tool, so that there are trees."""
ALGORITHMS = {
    "grpo": ["--branching.selector", "none", "--tools.names", "--optim.schedule", "linear"],
    "aepo": ["--branching.selector", "aepo", "--branching.dynamic_budget", "True", "--loss.old_logprobs", "rollout",
             "--loss.entropy_balanced_clipping", "True", "--loss.entropy_balanced_advantage", "True"],
    "random": ["--branching.selector", "random", "--branching.compat", "upstream", "--optim.schedule", "constant"],
    "gspo": ["--loss.kind", "gspo", "--loss.aggregation", "sequence_mean_token_mean", "--advantage.tree", "hard",
             "--loss.kl_coefficient", "0.1", "--loss.reference", "@WORLD@/model", "--loss.offload_reference", "True",
             "--loss.rollout_correction", "geometric_mis", "--loss.correction_low", "0.999",
             "--loss.correction_high", "1.001"],
    "cispo": ["--loss.kind", "cispo", "--loss.rollout_correction", "tis", "--loss.entropy_coefficient", "0.01",
              "--loss.entropy_balanced_advantage", "True"],
    "reinforce++": ["--loss.kind", "reinforce", "--loss.rollout_correction", "mis", "--loss.kl_coefficient", "0.1",
                    "--loss.kl_in", "reward", "--loss.kl_estimator", "k2", "--advantage.normalize", "batch"],
    "ppo": ["--advantage.kind", "gae", "--advantage.lam", "0.95", "--critic.warmup_steps", "1", "--critic.lr", "1e-3",
            "--critic.path", "@WORLD@/model", "--run.save_every", "1", "--optim.schedule", "linear"],
    "resampled": ["--branching.selector", "at2po", "--branching.num_initial_rollouts", "3",
              "--reward.file", "@WORLD@/reward.py:compute_hit", "--advantage.dead_groups", "resample",
              "--run.dump_every", "1", *SEARCHES],
    "at2po": ["--branching.selector", "at2po", "--loss.kind", "gspo", "--loss.ratio_over", "turn",
              "--loss.clip_low", "3e-3", "--loss.clip_high", "4e-3", "--loss.aggregation", "sequence_mean_token_mean",
              "--advantage.tree", "node", "--loss.rollout_correction", "sequence_mis", *SEARCHES],
    "tree grpo": ["--branching.selector", "tree_grpo", "--branching.expansion_rounds", "1",
                  "--advantage.tree", "inter_intra", "--loss.rollout_correction", "geometric_tis", *SEARCHES],
    "until mixed": ["--branching.selector", "top_h", "--branching.until_mixed", "True", *SEARCHES,
                    "--branching.num_initial_rollouts", "2", "--reward.file", "@WORLD@/reward.py:compute_hit"],
    "parents": ["--advantage.tree", "node_parent", "--loss.rollout_correction", "sequence_tis",
                "--loss.entropy_target", "9", "--run.save_every", "1", *SEARCHES],
    "no thoughts": ["--rollout.context", "strip_thoughts", "--rollout.max_trajectory_tokens", "2000", *SEARCHES,
                    "--rollout.max_response_tokens", "200", "--update.max_tokens_per_microbatch", "2000"],
    "notes": ["--rollout.context", "summary", "--rollout.context_tokens", "60", "--rollout.note_tokens", "8", *SEARCHES,
              "--rollout.answer_reserve_tokens", "290", "--rollout.max_response_tokens", "440",
              "--rollout.max_trajectory_tokens", "2000", "--update.max_tokens_per_microbatch", "2000",
              "--advantage.tree", "hard", "--run.dump_every", "1"],
    "spread over ranks": ["--model.context_parallel", "2"],
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = build_toy_world(tmp_path_factory.mktemp("world"))
    searching_model(folder / "searcher")
    return folder


def metrics_of_run(world, run: str, algorithm: str) -> list[dict[str, float]]:
    prepare = functools.partial(record_reads, RLConfig, world / f"{run}.reads")
    run_script("train_rl.py", *argv_of(world, run, algorithm), prepare=prepare)
    return read_metrics(world / "runs" / run)


def argv_of(world, run: str, algorithm: str) -> list[str]:
    chosen = [flag.replace("@WORLD@", str(world)) for flag in ALGORITHMS[algorithm]]
    return [str(world / "config.yaml"), *SHORT, "--run.name", run, *chosen]


def cut_and_resumed(world, algorithm: str) -> dict[str, float]:
    """Step 2 of a run that died after the save of step 1: a copy of the whole one, cut back."""
    folder = shutil.copytree(world / "runs" / algorithm, world / "runs" / f"cut {algorithm}", symlinks=True)
    shutil.rmtree(folder / "checkpoints" / "step_000002")
    [_, resumed] = metrics_of_run(world, folder.name, algorithm)
    return resumed


@pytest.fixture(scope="module")
def metrics_of(world):
    """algorithm -> the metrics of its steps; each is run once."""
    return functools.cache(lambda algorithm: metrics_of_run(world, algorithm, algorithm))


TREES = ["branching/branches_per_prompt", "group/mixed_share", "optim/grad_norm"]
CONTEXTS = ["branching/branches_per_prompt", "response/new_contexts"]
POSITIVE = {"at2po": TREES, "tree grpo": TREES, "parents": TREES, "no thoughts": CONTEXTS, "notes": CONTEXTS}
"""What a run must have in each step, for its trees, or its trajectories of several contexts, to be trained on."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_runs_and_all_its_numbers_are_finite(metrics_of, name):
    rows = metrics_of(name)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(row[metric] > 0 for row in rows for metric in POSITIVE.get(name, ()))
    # of all tokens, each behind the context that it was sampled behind
    assert rows[1]["optim/grad_norm"] > 0 and rows[1]["mismatch/abs"] < 1e-4


def test_until_mixed_groups_end_at_different_sizes(metrics_of):
    sizes = [row["group/effective_size"] for row in metrics_of("until mixed")]
    assert all(2 <= size <= 8 for size in sizes) and 2 < min(sizes) < 8


def test_the_reference_is_the_policy_before_training(metrics_of):
    """So a KL measured before the first update is 0, and later it is not."""
    assert [row["loss/kl"] > 0 for row in metrics_of("gspo")] == [True, True]
    before, later = metrics_of("reinforce++")
    assert abs(before["reward/kl_penalty"]) < 1e-6 < later["reward/kl_penalty"]


def test_the_policy_waits_until_the_critic_is_warm(metrics_of):
    warmup, after = metrics_of("ppo")
    assert "loss/policy" not in warmup and "loss/policy" in after
    assert after["critic/loss"] > 0 and abs(after["critic/value"] - after["critic/return"]) < abs(
        warmup["critic/value"] - warmup["critic/return"]
    )


def test_the_policys_schedule_begins_after_the_critics_warmup(metrics_of):
    """RLinf 1359: the rate's schedule passed while only the critic was trained. Two updates get 1 and 1/2 of it."""
    warmup, after = metrics_of("ppo")
    assert "optim/lr" not in warmup and after["optim/lr"] == pytest.approx(1e-2 * 3 / 4)


def test_a_resumed_run_goes_on_towards_its_entropy_target(metrics_of, world):
    first, second = metrics_of("parents")
    assert [first["loss/entropy_coefficient"], second["loss/entropy_coefficient"]] == [0, 0.001]
    resumed = cut_and_resumed(world, "parents")
    names = [name for name in second if name.startswith(("branching/", "reward/", "loss/"))]
    assert {name: resumed[name] for name in names} == {name: second[name] for name in names}


def test_a_run_with_a_critic_that_was_cut_off_in_its_warmup_ends_alike_bit_for_bit(metrics_of, world):
    """A save while the policy's optimizer has done nothing must not count as its first step."""
    whole = metrics_of("ppo")[1]
    resumed = cut_and_resumed(world, "ppo")
    for name in ("reward/mean", "critic/loss", "critic/grad_norm", "optim/grad_norm", "loss/policy", "loss/entropy"):
        assert resumed[name] == whole[name], name
    one, other = (tensors_of(world / "runs" / run / "checkpoints" / "step_000002") for run in ("ppo", "cut ppo"))
    assert one == other and len(one) == 2


def groups_of(world, run: str, step: int) -> dict[str, list[dict]]:
    """prompt -> its dumped trajectories, in the order in which prompts were sampled."""
    groups: dict[str, list[dict]] = {}
    for row in read_jsonl(world / "runs" / run / "trajectories" / f"step_{step:06d}.jsonl.gz"):
        groups.setdefault(row["prompt_id"], []).append(row)
    return groups


def test_further_prompts_are_sampled_for_dead_groups_and_mixed_groups_alone_are_trained_on(metrics_of, world):
    rows = metrics_of("resampled")
    assert any(row["group/resampled_prompts"] > 0 for row in rows), rows
    for row in rows:
        groups = groups_of(world, "resampled", row["step"])
        assert len(groups) == 4 + row["group/resampled_prompts"] <= 12
        mixed = [name for name, group in groups.items() if len({t["reward"] for t in group}) > 1]
        trained = [name for name, group in groups.items() if any(t["advantage"] is not None for t in group)]
        assert trained == mixed[:4] and all(len(group) == 8 for group in groups.values())


# ---- the needs of the options: a knob that a run never reads has no effect in it, so a need of it must be unmet

OUTSIDE_THESE_RUNS = {
    "run.keep_checkpoints", "run.stop_on_collapse", "run.stop_at_accuracy",  # after a save or a validation
    "run.resume", "run.resume_changed",  # by the checks of arpo/start
    "model.enable_thinking",  # by a chat template
    "engine.gpu_memory_utilization", "engine.cuda_graphs", "engine.async_scheduling",  # on a GPU
    "rollout.max_tool_calls", "rollout.max_result_tokens", "rollout.answer_reserve_tokens",  # at the first tool call
    "tools.search.deadline_s", "tools.search.cache",  # by a search of the web
}  # fmt: skip
"""Knobs that a run may leave unread though they have an effect; where they are read."""
UNNOTICED = {
    "advantage.kind": ["advantage.dead_groups", "advantage.keep_variance", "advantage.max_resample", "critic.path",
                       "critic.warmup_steps"],
    "branching.selector": ["advantage.tree", "branching.dynamic_budget", "branching.max_branches_per_turn",
                           "branching.num_initial_rollouts", "branching.until_mixed"],
    "data.valid": ["data.num_valid_prompts", "run.stop_at_accuracy"],
    "eval.benchmarks": ["eval.data_dir"],
    "eval.server": ["engine.async_scheduling", "engine.cuda_graphs", "engine.dtype", "engine.gpu_memory_utilization",
                    "engine.kv_cache_gib", "engine.max_num_batched_tokens", "engine.model_runner",
                    "engine.quantization", "engine.tensor_parallel", "eval.server_model"],
    "judge.url": ["judge.cache", "judge.max_concurrent", "judge.model"],
    "loss.kl_coefficient": ["loss.reference"],
    "loss.kl_in": ["advantage.dead_groups"],
    "loss.old_logprobs": ["loss.rollout_correction"],
    "protocol.format": ["reward.compat"],
    "reward.compat": ["reward.bonus_tools"],
    "reward.terms": ["reward.bonus_tools", "reward.compat", "reward.file"],
    "rollout.temperature": ["rollout.top_p"],
    "run.validate_every": ["run.stop_at_accuracy"],
    "tools.names": ["tools.search.cache"],
    "tools.search.backend": ["tools.search.deadline_s"],
}  # fmt: skip
"""Setting -> knobs that need it, and are read in these runs without it too, or outside of these runs."""


def needs_in(root: type) -> set[tuple[str, str]]:
    """(knob, setting that it needs) of a config."""
    return {
        (knob, need.owner) for knob, facts in facts_of(root).items() for need in of_kind(Needs, facts) if need.owner
    }


def unread(world, name: str) -> Iterator[tuple[str, list[str]]]:
    """(knob that the run did not read, its needs that are not met)."""
    read = set((world / f"{name}.reads").read_text().split())
    values = leaves(load_config(RLConfig, argv_of(world, name, name)))
    for knob, facts in facts_of(RLConfig).items():
        if knob not in read:
            needs = [need for need in of_kind(Needs, facts) if need.owner in values]
            yield knob, [need.owner for need in needs if not need.is_met(values[need.owner])]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_knob_that_a_run_never_reads_declares_a_need_that_the_run_does_not_meet(metrics_of, world, name):
    metrics_of(name)
    assert [knob for knob, unmet in unread(world, name) if not unmet and knob not in OUTSIDE_THESE_RUNS] == []


def test_a_need_that_no_run_would_miss_stands_here_a_second_time(metrics_of, world):
    """A run misses a need if it is the only unmet need of a knob that the run does not read."""
    missed = set()
    for name in ALGORITHMS:
        metrics_of(name)
        missed |= {(knob, unmet[0]) for knob, unmet in unread(world, name) if len(unmet) == 1}
    missed -= {(knob, owner) for knob, owner in missed if knob in OUTSIDE_THESE_RUNS}
    second_time = {(knob, owner) for owner, knobs in UNNOTICED.items() for knob in knobs}
    assert needs_in(RLConfig) - missed <= second_time, "add them to UNNOTICED"
    assert second_time <= needs_in(RLConfig) | needs_in(SFTConfig) | needs_in(EvalConfig)
