"""Edits as a researcher would make them: one function, one line in a dict and, for a knob, one field in options.py.

Each is made in a copy of the project, which is then used as ever. Nothing else there may need to know the new name.
"""

import pytest
from helpers.edits import edited_copy, run_in

RLOO = """

def rloo(evidence: GroupEvidence, cfg: AdvantageConfig) -> Tensor:
    \"\"\"Reward less the mean of the others in the group, times a scale (arXiv 2402.14740).\"\"\"
    advantages = evidence.rewards.clone()
    for indices in members(evidence.group_ids):
        rewards = evidence.rewards[indices]
        if len(indices) > 1:
            advantages[indices] = rewards - (rewards.sum() - rewards) / (len(indices) - 1)
    return cfg.rloo_scale * advantages
"""

USE_RLOO = """
from arpo.advantages import assign_advantages, token_advantages
from arpo.config import load_config
from arpo.errors import UserError
from arpo.trajectory import Group, Prompt, Trajectory
from train_rl import RLConfig

RL = ["--data.train", "x"]
cfg = load_config(RLConfig, [*RL, "--advantage.kind", "rloo", "--advantage.rloo_scale", "2.0",
                             "--advantage.dead_groups", "drop", "--advantage.tree", "hard"]).advantage
assert not cfg.needs_critic
rewards = [3.0, 0.0, 0.0]
trajectories = [Trajectory("p", str(i), [5], [1], [0.0], reward=reward) for i, reward in enumerate(rewards)]
group = Group(Prompt("p", [], []), trajectories)
assign_advantages([group], cfg)
assert [t.advantage for t in group.trajectories] == [6.0, -3.0, -3.0], group
assert token_advantages(group, cfg.tree, cfg)["1"].tolist() == [-3.0]
for flags in (["--advantage.kind", "rlo"], ["--advantage.kind", "rloo", "--critic.lr", "1e-4"]):
    try:
        load_config(RLConfig, [*RL, *flags])
    except UserError as error:
        print(error)
"""


def test_an_advantage_estimator_is_one_function_and_one_line(tmp_path):
    edits = {
        "arpo/advantages.py": [
            ("normalize_std=cfg.normalize_std)\n", RLOO),
            ("GROUP_ESTIMATORS: dict[str, Callable[[GroupEvidence, AdvantageConfig], Tensor]] = {", '"rloo": rloo, '),
        ],
        "arpo/options.py": [('    tree: str = "soft"\n', '    """ """\n    rloo_scale: float = 1.0\n')],
    }
    printed = run_in(edited_copy(tmp_path, edits), USE_RLOO).splitlines()
    assert "did you mean 'rloo'" in printed[0] and all(word in printed[1] for word in ("critic.lr", "rloo", "gae"))


SAPO = """

def sapo(inputs: LossInputs, cfg: LossConfig) -> TokenLosses:
    \"\"\"A sigmoid gate in place of the clip (arXiv 2511.20347): l = -A 4 / tau sigmoid(tau (r - 1)).\"\"\"
    ratio = inputs.log_ratio.exp()
    gate = torch.sigmoid(cfg.sapo_temperature * (ratio - 1))
    return TokenLosses(-inputs.advantages * gate * 4 / cfg.sapo_temperature, ratio, {"gate": gate.detach()})
"""

USE_SAPO = """
import math
import torch
from arpo.config import load_config
from arpo.errors import UserError
from arpo.losses import LossInputs, policy_loss
from train_rl import RLConfig

RL = ["--data.train", "x"]
flags = ["--loss.kind", "sapo", "--loss.sapo_temperature", "2.0", "--loss.kl_coefficient", "0.1"]
cfg = load_config(RLConfig, [*RL, *flags])
logprobs = torch.tensor([[1.0, 3.0]]).log().requires_grad_()
mask = torch.tensor([[1, 0]])
ones, zeros = torch.ones(1, 2), torch.zeros(1, 2)
loss, metrics = policy_loss(LossInputs(logprobs, zeros, ones, mask, ref_logprobs=zeros), cfg.loss)
loss.backward()
assert loss.item() == -1.0 and logprobs.grad.tolist() == [[-1.0, 0.0]], (loss, logprobs.grad)  # on-policy: -A
assert metrics["gate"] == 0.5 and metrics["ratio_max"] == 1.0 and metrics["clip_fraction"] == 0.0
try:
    load_config(RLConfig, [*RL, "--loss.kind", "sap0"])
except UserError as error:
    print(error)
"""


def test_a_loss_with_a_knob_is_one_function_one_line_and_one_field(tmp_path):
    edits = {
        "arpo/losses.py": [
            ("    return TokenLosses(-inputs.advantages * inputs.logprobs, inputs.log_ratio.exp())\n", SAPO),
            ("TOKEN_LOSSES: dict[str, TokenLoss] = {", '"sapo": sapo, '),
        ],
        "arpo/options.py": [
            ('"""Ratio clip above 1."""\n', '    sapo_temperature: float = 1.0\n    """sapo: tau."""\n')
        ],
    }
    assert "did you mean 'sapo'? use one of sapo, ppo" in run_in(edited_copy(tmp_path, edits), USE_SAPO)


def test_an_edit_in_a_place_that_is_not_there_is_noticed(tmp_path):
    with pytest.raises(AssertionError, match="occurs 0 times"):
        edited_copy(tmp_path, {"arpo/losses.py": [("no such line", "x = 1")]})
