"""The functions that scripts outside this repository call keep their parameters. A new one comes last, with a default."""

import inspect
from importlib import import_module

import pytest

CONTRACTS = {
    "arpo.losses.LossInputs": "logprobs, old_logprobs, advantages, mask, entropy, ref_logprobs, rollout_weights",
    "arpo.losses.policy_loss": "inputs, cfg, *, denominator, entropy_statistics",
    "arpo.advantages.token_advantages": "group, tree",
    "arpo.advantages.group_advantages": "rewards, group_ids, *, normalize_std, eps",
    "arpo.advantages.gae_advantages": "token_rewards, values, mask, *, gamma, lam",
    "arpo.branching.branch_probability": "delta_entropy, *, base, weight, consecutive, penalty",
    "arpo.branching.initial_rollouts": "group_size, root_entropy, tool_entropy, *, beta",
    "arpo.rewards.score": "response_text, answers, data_source, *, compat",
    "arpo.data.load_prompts": "path",
    "arpo.evals.pass_at_k": "num_samples, num_correct, k",
    "arpo.tools.python.PythonTool": "cfg",
}
WITH_DEFAULTS = (
    "entropy ref_logprobs rollout_weights denominator entropy_statistics normalize_std eps gamma lam".split()
)
WITH_DEFAULTS += "base weight consecutive penalty compat".split()


@pytest.mark.parametrize("path", CONTRACTS)
def test_a_function_of_the_contract_has_its_parameters(path):
    module, _, name = path.rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), name)).parameters
    positional, _, keywords = CONTRACTS[path].partition("*, ")
    wanted = [n for n in positional.rstrip(", ").split(", ") if n]
    assert list(parameters)[: len(wanted)] == wanted
    for keyword in [n for n in keywords.split(", ") if n]:
        assert parameters[keyword].kind is inspect.Parameter.KEYWORD_ONLY
    for parameter in parameters.values():
        is_optional = parameter.name in WITH_DEFAULTS or parameter.name not in CONTRACTS[path]
        assert is_optional == (parameter.default is not inspect.Parameter.empty), parameter
