"""A pretrained model on the papers' RL data: two steps under a reward of one's own.

The model is SmolLM2-135M without most of its layers, so it says nothing of sense; its tokenizer, template, head of 49k
tokens and pretrained embeddings are real, and so are the questions.
"""

import pyarrow.parquet as parquet
import pytest
from helpers.pretrained import pretrained_model
from helpers.ranks import ROOT, run_script

from arpo.log import read_metrics

QUESTIONS = ROOT.parent / "shared/data/rl/train_10k.parquet"
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Share of letters: easier than the answer."""
    assert ground_truth and data_source
    return {"score": sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1), "length": len(solution_str)}
'''
CONFIG = """
run: {num_steps: 2, validate_every: 0, save_every: 0}
data: {num_prompts_per_step: 2, max_prompt_tokens: 320, overlong: drop}
model: {compute_dtype: float32, recompute_every_n_layers: 0}
engine: {dtype: float32, kv_cache_gib: 0.1, max_num_seqs: 16}
rollout: {group_size: 4, max_response_tokens: 32, max_result_tokens: 16, answer_reserve_tokens: 8}
branching: {selector: arpo, num_initial_rollouts: 2}
tools: {names: [python]}
update: {num_prompts_per_minibatch: 2, max_tokens_per_microbatch: 1024}
optim: {lr: 3.0e-4}
"""


@pytest.mark.slow
@pytest.mark.skipif(not QUESTIONS.exists(), reason="the papers' RL questions are not here")
def test_the_real_questions_teach_a_real_model(tmp_path_factory, tmp_path):
    few_layers = pretrained_model(tmp_path_factory)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "config.yaml").write_text(CONFIG)
    questions = tmp_path / "questions.parquet"
    parquet.write_table(parquet.read_table(QUESTIONS).slice(5000, 500), questions)  # the run tokenizes all of them
    flags = ["--model.path", str(few_layers), "--run.dir", str(tmp_path), "--run.name", "rl"]
    flags += ["--data.train", str(questions), "--reward.file", str(tmp_path / "reward.py")]
    run_script("train_rl.py", str(tmp_path / "config.yaml"), *flags, ranks=1)
    rows = [row for row in read_metrics(tmp_path / "rl") if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2]
    # Both sides in float32, so the rollout's logprobs are the trainer's; and what is rewarded becomes more frequent.
    assert all(row["mismatch/kl"] < 1e-4 for row in rows)
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"]
