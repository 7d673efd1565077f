"""The experiment at a frozen pretrained policy: an engine that remembers, and what its groups are written as."""

import json
from contextlib import closing

from helpers.fakes import EchoTool
from helpers.scripted_rollout import call_then_answer, play, score
from transformers import AutoTokenizer

from arpo.config.sections import EngineConfig
from arpo.engine import Engine
from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import TagsCodec
from arpo.start.load import load_config
from arpo.trajectory import Prompt
from extras.ablation import llm_task
from extras.ablation.llm_forks import ARMS, Remembering, flags_of, line_of, report, sums_of
from train_rl import RLConfig


def test_arms_that_sample_at_the_same_place_share_the_trajectory_and_nothing_is_sampled_twice(tiny_model_dir):
    engine = Engine(str(tiny_model_dir), EngineConfig(dtype="float32", kv_cache_gib=0.05), max_model_len=300, seed=0)
    codec = TagsCodec(AutoTokenizer.from_pretrained(tiny_model_dir))
    tools = [EchoTool(tag, "42") for tag in ("search", "python")]
    messages = [{"role": "user", "content": "who wrote the book?"}]
    prompts = [Prompt("p", messages, ["42"], token_ids=tuple(codec.render_prompt(messages)))]
    cfg = RolloutConfig(group_size=6, max_response_tokens=160, max_tool_calls=3, max_result_tokens=40,
                        answer_reserve_tokens=20)  # fmt: skip
    how = {"cfg": cfg, "engine": Remembering(engine), "tools": tools, "prompts": prompts, "codec": codec, "seed": 1}
    found, sampled = [], []
    with closing(engine):
        for selector in ("none", "top_h", "none"):
            found += play(None, branching=BranchingConfig(selector=selector, num_initial_rollouts=2), **how)
            sampled.append(engine.stats.generated_tokens)
    texts = [{t.trajectory_id: t.token_ids for t in group.trajectories} for group in found]
    assert texts[0] == texts[2] and sampled[1] == sampled[2] > 0
    assert all(texts[1][root] == texts[0][root] for root in ("0", "1"))
    new = [t for t in found[1].trajectories if t.trajectory_id not in texts[0]]
    assert new and sampled[1] - sampled[0] == sum(sum(t.loss_mask[t.fork_at :]) for t in new)
    assert [t.turns[0].entropy for t in found[0].trajectories] == [t.turns[0].entropy for t in found[2].trajectories]


def test_a_groups_line_has_its_roots_and_what_each_branch_differs_from():
    [group] = play(call_then_answer, branching=BranchingConfig(selector="top_h", num_initial_rollouts=1))
    score([group])
    for reward, t in zip((1.0, 0.0, 1.0, -1.0), group.trajectories, strict=True):
        t.reward, t.reward_parts = reward, {"accuracy": max(reward, 0.0)}
    line = line_of(group, "top_h_2", 0)
    [root], branches = line["roots"], line["branches"]
    assert root[:2] == [1.0, 1.0] and root[3] == 1 and len(branches) == 3
    assert [branch[:2] + branch[3:5] for branch in branches] == [[1, 2, 1.0, 1.0], [1, 2, 0.0, 0.0], [1, 2, 2.0, 1.0]]
    assert all(branch[6] == 0 and 0 < branch[5] < root[2] for branch in branches)
    branch_tokens = sum(branch[5] for branch in branches)
    assert sums_of(line).tolist() == [3.0, 2.0, branch_tokens, 0, 3.0, 2.0, branch_tokens + root[2], 1]


def test_the_report_divides_the_contrast_by_what_was_sampled_and_pairs_by_question():
    lines = []
    for question in "abc":
        for arm, calls in {"grpo": 4, "top_h_2": 2}.items():
            roots, branches = [[0.0, 0.0, 10, calls], [1.0, 1.0, 10, calls]], []
            if arm != "grpo":
                branches = [[1, 3, 0.5, 1.0, 1.0, 20, calls]]
            lines.append({"question": question, "seed": 0, "arm": arm, "roots": roots, "branches": branches})
    table = report(lines).split("relative to grpo")[1].splitlines()
    # a branch: 1 for 2 calls against 1 for 4; the group: 2 for 6 against 1 for 8, and 2 for 40 tokens against 1 for 20
    assert table[2].startswith("| top_h_2 | 2.00 [2.00, 2.00] | 0.50 [0.50, 0.50] | 2.67 [2.67, 2.67] | 1.00 [1.00")


def test_every_arm_is_one_of_the_settings_of_training_and_the_task_keeps_long_solutions(tmp_path):
    configs = [load_config(RLConfig, ["configs/llm_arpo.yaml", *flags_of(arm)]) for arm in ARMS]
    assert len({repr(config.branching) for config in configs}) == len(ARMS) and next(iter(ARMS)) == "grpo"
    rows = [{"question": f"q{n}", "answer": "a <<1+1=2>>2\n" * n + "#### 2"} for n in (1, 2, 3, 4)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    llm_task.build(tmp_path / "out", str(tmp_path))
    questions = (tmp_path / "out/questions.jsonl").read_text()
    assert questions.count("\n") == 2 and '"q3"' in questions and '"q4"' in questions
    assert (tmp_path / "out/sft_train.jsonl").read_text().count("<python>") == 7
