"""Functions that scripts outside this repository call keep their parameters. A new one comes last, with a default."""

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
OPTIONAL = {
    *("entropy", "ref_logprobs", "rollout_weights", "denominator", "entropy_statistics", "normalize_std", "eps"),
    *("gamma", "lam", "base", "weight", "consecutive", "penalty", "compat"),
}


@pytest.mark.parametrize("path", CONTRACTS)
def test_a_function_of_the_contract_has_its_parameters(path):
    module, _, name = path.rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), name)).parameters
    positional, _, keyword_only = (part.strip(", ").split(", ") for part in CONTRACTS[path].partition("*"))
    keyword_only = [name for name in keyword_only if name]
    assert list(parameters)[: len(positional)] == positional
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in keyword_only)
    for parameter in parameters.values():
        is_required = parameter.name in {*positional, *keyword_only} - OPTIONAL
        assert is_required == (parameter.default is inspect.Parameter.empty), parameter
