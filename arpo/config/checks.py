"""Settings that have no effect, lie outside their range, or contradict each other.

`NEEDS` says which setting gives a knob its effect: a knob that was changed while that setting is off is refused by
`arpo.config.load`, for every script alike. Below it are the ranges of numbers, and the contradictions between sections;
a section itself finds those within it (options.py). Imports no torch, so that a mistake shows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from math import inf
from typing import NamedTuple

from arpo.config.sections import DataConfig, EngineConfig, ModelConfig
from arpo.config.tools import SearchConfig
from arpo.errors import require
from arpo.named import is_own, names_of
from arpo.options import (
    AdvantageConfig,
    BranchingConfig,
    LossConfig,
    RolloutConfig,
    UpdateConfig,
    is_retrospective,
)

# ---- a knob without effect


class Need(NamedTuple):
    """The setting that gives a knob its effect."""

    owner: str
    """Key of that setting, like "loss.kind"."""
    is_met: Callable[[object], bool]
    """Returns whether this value of the owner gives the knob an effect."""
    value: str
    """A value that does, as the error message shows it."""


def one_of(owner: str, *values: object) -> Need:
    return Need(owner, lambda value: value in values, " or ".join(str(value) or '""' for value in values))


def none_of(owner: str, *values: str, use: str) -> Need:
    """The need of a value other than these: a new loss or rule gives the knob an effect too. `use`: what to set."""
    return Need(owner, lambda value: value not in values, use)


def given(owner: str, use: str) -> Need:
    """The need of a value that is neither 0 nor empty nor False."""
    return Need(owner, bool, use)


def has_term(*names: str, or_none: bool = False) -> Need:
    """The need of one of these among `reward.terms`; `or_none`: or of no terms at all."""

    def is_met(terms: tuple[str, ...]) -> bool:
        return (or_none and not terms) or any(term.rpartition("=")[0] in names for term in terms)

    return Need("reward.terms", is_met, f"{names[0]}=1")


def judges(*but: str, use: str = "arpo or aepo") -> Need:
    """The need of a rule that judges each tool result as it comes, and is none of `but`."""
    return Need("branching.selector", lambda s: s not in ("none", *but) and not is_retrospective(s), use)


BRANCHES = none_of("branching.selector", "none", use="arpo or aepo")
RETROSPECTIVE = Need("branching.selector", is_retrospective, " or ".join(names_of("retrospective", "EXPANSIONS")))
SCALE_FREE = ("standardized", "quantile")
CRITICS = names_of("advantages", "CRITIC_ESTIMATORS")
GROUPS = none_of("advantage.kind", *CRITICS, use=" or ".join(names_of("advantages", "GROUP_ESTIMATORS")))
CRITIC = one_of("advantage.kind", *CRITICS)
CLIPS = none_of("loss.kind", "reinforce", use="ppo, gspo or cispo")
NO_LOW = ("none", "tis", "sequence_tis", "geometric_tis")
REFERENCE = given("loss.kl_coefficient", "0.001")
PYTHON = Need("tools.names", lambda names: "python" in names, "python")
SEARCH = Need("tools.names", lambda names: "search" in names, "search")
SEARCHES = none_of("tools.search.backend", "replay", use="local, http, brightdata or serper")
ONLINE = none_of("tools.search.backend", "local", "replay", use="http, brightdata or serper")
READS_PAGES = given("tools.search.read_pages", "3")
LIVE = one_of("eval.replay", False)
BUILT_IN = one_of("reward.file", "")
ONE_REWARD = Need("reward.terms", lambda terms: not terms, "[] (name the function there: FILE.py:FUNCTION=WEIGHT)")

NEEDS: dict[str, tuple[Need, ...]] = {
    "run.num_epochs": (one_of("run.num_steps", 0),),
    "model.checkpoint_every_n_layers": (given("model.activation_checkpointing", "True"),),
    "model.lora_alpha": (given("model.lora_rank", "16"),),
    "model.lora_targets": (given("model.lora_rank", "16"),),
    "data.num_valid_prompts": (given("data.valid", "FILE"),),
    "engine": (one_of("eval.server", ""),),
    "engine.max_num_seqs": (),  # with a server, the requests under way
    "rollout.top_p": (given("rollout.temperature", "1"),),
    "rollout.pull_order": (one_of("rollout.dispatch", "pull"),),
    "rollout.reuse_lenience": (given("rollout.reuse_last_epoch", "True"),),
    "branching": (judges(),),
    "branching.selector": (),
    "branching.expansion_rounds": (RETROSPECTIVE,),
    "branching.num_initial_rollouts": (BRANCHES, one_of("branching.dynamic_budget", False)),
    "branching.base": (judges(), one_of("branching.compat", "paper")),
    "branching.weight": (judges("random", *SCALE_FREE),),
    "branching.rule": (judges("random"),),
    "branching.weight_z": (one_of("branching.selector", "standardized"),),
    "branching.branch_rate": (one_of("branching.selector", "quantile"),),
    "branching.signal": (one_of("branching.selector", *SCALE_FREE),),
    "branching.threshold": (judges(), one_of("branching.rule", "threshold")),
    "branching.entropy_tokens": (none_of("branching.entropy_mode", "upstream", use="exact or topk"),),
    "branching.entropy_mode": (),  # turn entropies are measured, and logged, without branches too
    "branching.budget_weight": (given("branching.dynamic_budget", "True"),),
    "branching.consecutive_penalty": (judges("random", *SCALE_FREE, "arpo", use="aepo"),),
    "branching.compat": (one_of("branching.selector", "aepo"),),
    "reward.file": (ONE_REWARD,),
    "reward.function": (given("reward.file", "FILE"),),
    "reward.compat": (
        BUILT_IN,
        has_term(*names_of("rewards/terms", "BY_RULE"), or_none=True),
        one_of("protocol.format", "tags"),
    ),
    "reward.bonus_tools": (BUILT_IN, has_term("answer", "tool_bonus", or_none=True), one_of("reward.compat", "paper")),
    "reward.overlong_buffer_tokens": (has_term("overlong"),),
    "advantage.tree": (GROUPS, BRANCHES),
    "advantage.normalize": (
        GROUPS,
        none_of("advantage.tree", *names_of("advantages", "FROM_REWARDS"), use="soft or hard"),
    ),
    "advantage.normalize_std": (GROUPS, one_of("advantage.normalize", "group")),
    "advantage.dead_groups": (GROUPS, one_of("loss.kl_in", "loss")),  # unequal penalties: no group is dead
    "advantage.max_resample": (GROUPS, one_of("advantage.dead_groups", "resample")),
    "advantage.gamma": (CRITIC,),
    "advantage.lam": (CRITIC,),
    "critic": (CRITIC,),
    "loss.ratio_over": (none_of("loss.kind", "ppo", "cispo", "reinforce", use="gspo"),),
    "loss.clip_low": (CLIPS,),
    "loss.clip_high": (CLIPS,),
    "loss.dual_clip": (none_of("loss.kind", "gspo", "cispo", "reinforce", use="ppo"),),
    "loss.entropy_balanced_clipping": (none_of("loss.kind", "cispo", "reinforce", use="ppo or gspo"),),
    "loss.balanced_clipping_tokens": (given("loss.entropy_balanced_clipping", "True"),),
    "loss.entropy_advantage_weight": (given("loss.entropy_balanced_advantage", "True"),),
    "loss.kl_estimator": (REFERENCE,),
    "loss.kl_in": (REFERENCE,),
    "loss.reference": (REFERENCE,),
    "loss.offload_reference": (REFERENCE,),
    "loss.rollout_correction": (one_of("loss.old_logprobs", "recompute"),),  # else the weights are 1
    "loss.correction_low": (none_of("loss.rollout_correction", *NO_LOW, use="mis or sequence_mis or geometric_mis"),),
    "loss.correction_high": (none_of("loss.rollout_correction", "none", use="tis or mis"),),
    "optim.decay_ratio": (one_of("optim.schedule", "linear"),),
    "optim.min_lr_ratio": (one_of("optim.schedule", "linear", "cosine"),),
    "tools.python": (PYTHON,),
    "tools.python.mode": (PYTHON, LIVE),
    "tools.search": (SEARCH,),
    "tools.search.corpus": (one_of("tools.search.backend", "local"),),
    "tools.search.url": (ONLINE,),
    "tools.search.zone": (one_of("tools.search.backend", "brightdata"),),
    "tools.search.market": (one_of("tools.search.backend", "brightdata", "serper"),),
    "tools.search.location": (one_of("tools.search.backend", "brightdata", "serper"),),
    "tools.search.top_k": (SEARCHES,),
    "tools.search.requests_per_second": (ONLINE,),
    "tools.search.deadline_s": (SEARCHES,),
    "tools.search.read_pages": (ONLINE,),
    "tools.search.page_chars": (READS_PAGES,),
    "tools.search.browse_private_addresses": (READS_PAGES,),
    "tools.search.summarizer_url": (READS_PAGES,),
    "tools.search.summarizer_model": (given("tools.search.summarizer_url", "URL"),),
    "tools.search.mode": (SEARCH, LIVE),
    "eval.data_dir": (given("eval.benchmarks", "all"),),
    "eval.server_model": (given("eval.server", "URL"),),
    "judge": (given("judge.url", "URL"),),
    "judge.url": (has_term("judge"),),
}
"""Knob or section -> all that it needs. A section's line holds for those of its knobs that have no line of their own. A
need whose owner a script does not have is met there."""


class Ignored(NamedTuple):
    """A knob that was changed from its default without effect."""

    knob: str
    owner: str
    """Key of the setting that takes the effect from it."""
    message: str


def ignored(cfg: object) -> list[Ignored]:
    """Return all knobs of a script's config that differ from their default while what they need is off."""
    values = leaves(cfg)
    defaults = leaves({f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(cfg)})
    found = []
    for knob in [knob for knob, value in values.items() if value != defaults[knob]]:
        for owner, is_met, use in needs_of(knob):
            if owner in values and not is_met(values[owner]):
                now = "empty" if values[owner] in ("", ()) else values[owner]
                message = f"{knob}={values[knob]} is ignored unless {owner}={use} (it is {now})"
                found.append(Ignored(knob, owner, message))
    return found


def needs_of(knob: str) -> tuple[Need, ...]:
    """Return what NEEDS says of the knob, else of its section; nothing means that the knob always matters."""
    return NEEDS.get(knob, NEEDS.get(knob.rpartition(".")[0], ()))


def leaves(tree: object, prefix: str = "") -> dict[str, object]:
    """Return all values of nested configs or dicts by dotted keys. {"run": {"seed": 3}} -> {"run.seed": 3}"""
    found: dict[str, object] = {}
    for name, value in (vars(tree) if is_dataclass(tree) else tree).items():
        is_section = is_dataclass(value) or isinstance(value, dict)
        found |= leaves(value, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return found


def half_chosen_aepo(branching: BranchingConfig, loss: LossConfig) -> str:
    """Return a warning that names the parts of AEPO that selector=aepo came without; "" where nothing is missing."""
    parts = {
        "branching.dynamic_budget": branching.dynamic_budget,
        "loss.entropy_balanced_clipping": loss.entropy_balanced_clipping,
        "loss.entropy_balanced_advantage": loss.entropy_balanced_advantage,
    }
    missing = [name for name, is_on in parts.items() if not is_on]
    if branching.selector != "aepo" or not missing:
        return ""
    return f"warning: branching.selector=aepo without {', '.join(missing)}; all of AEPO is in configs/aepo.yaml"


# ---- a value outside its range

RANGES: dict[tuple[float, float], str] = {
    (
        0,
        inf,
    ): "run.num_steps run.validate_every run.save_every run.dump_every run.keep_dumps model.lora_rank model.shard_size "
    "data.num_valid_prompts rollout.max_tool_calls rollout.temperature rollout.carry_over branching.weight_z "
    "branching.budget_weight branching.consecutive_penalty critic.lr model.lora_alpha engine.kv_cache_gib "
    "critic.warmup_steps loss.clip_low loss.clip_high loss.entropy_advantage_weight loss.kl_coefficient "
    "optim.lr optim.weight_decay optim.max_grad_norm eval.max_questions eval.num_muted run.silence_timeout_s "
    "run.peer_timeout_minutes loss.correction_low reward.overlong_buffer_tokens judge.max_calls_per_step "
    "judge.max_calls "
    "rollout.reuse_lenience",
    (1, inf): "run.num_epochs model.checkpoint_every_n_layers model.context_parallel data.num_prompts_per_step "
    "data.num_conversations_per_step data.max_tokens engine.tensor_parallel engine.max_num_seqs "
    "engine.max_num_batched_tokens rollout.group_size rollout.max_response_tokens "
    "branching.max_branches_per_turn branching.entropy_tokens branching.expansion_rounds advantage.max_resample "
    "data.max_prompt_tokens eval.max_prompt_tokens "
    "rollout.max_result_tokens data.max_tokens_per_microbatch update.max_tokens_per_microbatch "
    "tools.search.page_chars update.num_prompts_per_minibatch update.num_epochs eval.num_samples "
    "judge.max_concurrent",
    (2, inf): "run.keep_checkpoints",  # so that a broken one has a fallback
    (0, 1): "branching.base branching.branch_rate branching.threshold engine.gpu_memory_utilization rollout.top_p "
    "advantage.gamma advantage.lam optim.warmup_ratio optim.decay_ratio optim.min_lr_ratio",
}
"""(smallest, largest value) -> the knobs that must lie between them."""


def out_of_range(cfg: object) -> str:
    """Return an error message for a number of a script's config that lies outside its range; "" if all fit."""
    values = leaves(cfg)
    for (low, high), knobs in RANGES.items():
        for knob in knobs.split():
            if values.get(knob) is not None and not low <= values[knob] <= high:
                bounds = f"be at least {low}" if high == inf else f"lie between {low} and {high}"
                return f"{knob}={values[knob]} must {bounds}"
    return ""


# ---- contradictions between sections


def check_sizes(data: DataConfig, rollout: RolloutConfig, branching: BranchingConfig, update: UpdateConfig) -> None:
    """Raise ValueError where the sizes of these sections do not fit each other."""
    require(data.train, "data.train is empty; pass a parquet or jsonl file of prompts")
    require(
        branching.selector == "none"
        or branching.dynamic_budget
        or 1 <= branching.num_initial_rollouts <= rollout.group_size,
        f"branching.num_initial_rollouts={branching.num_initial_rollouts} must lie between 1 and "
        f"rollout.group_size={rollout.group_size}; lower it or raise the group size",
    )
    require(
        update.num_prompts_per_minibatch > 0 and data.num_prompts_per_step % update.num_prompts_per_minibatch == 0,
        f"data.num_prompts_per_step={data.num_prompts_per_step} is not a multiple of "
        f"update.num_prompts_per_minibatch={update.num_prompts_per_minibatch}",
    )
    require(
        1 <= rollout.answer_reserve_tokens < rollout.max_response_tokens,
        f"rollout.answer_reserve_tokens={rollout.answer_reserve_tokens} must lie between 1 and "
        f"rollout.max_response_tokens={rollout.max_response_tokens}",
    )
    longest = data.max_prompt_tokens + rollout.max_response_tokens
    require(
        longest <= update.max_tokens_per_microbatch,
        f"update.max_tokens_per_microbatch={update.max_tokens_per_microbatch} cannot hold one trajectory of "
        f"data.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens; raise it",
    )
    require(
        rollout.temperature > 0,
        "rollout.temperature must be above 0 in training: greedy rollouts have nothing to learn from",
    )


def check_result_room(search: SearchConfig, rollout: RolloutConfig) -> None:
    """Raise ValueError where search results are so long that the pages in them would always be cut off again."""
    least_tokens = search.read_pages * search.page_chars // 8  # web text has about 4 characters per token, 8 at most
    require(
        search.summarizer_url or least_tokens <= rollout.max_result_tokens,
        f"tools.search.read_pages={search.read_pages} x page_chars={search.page_chars} are at least {least_tokens} "
        f"tokens, of which rollout.max_result_tokens={rollout.max_result_tokens} cuts off the end; raise it, or "
        "lower page_chars",
    )


def check_loss(loss: LossConfig) -> None:
    """Raise ValueError where negative advantages, or the KL to the reference, would have no gradient."""
    require(
        loss.dual_clip is None or loss.dual_clip > 1,
        f"loss.dual_clip={loss.dual_clip} must be above 1, or no token with a negative advantage has a gradient at "
        "ratio 1; None = no bound",
    )
    require(
        not (loss.kl_coefficient and loss.kl_in == "loss" and loss.kl_estimator == "k1"),
        "loss.kl_estimator=k1 does nothing in the loss, where its gradient averages to 0; take k2 or k3, or set "
        "loss.kl_in=reward",
    )


def check_sampling_policy(
    engine: EngineConfig, loss: LossConfig, rollout: RolloutConfig, advantage: AdvantageConfig
) -> None:
    """Raise ValueError where tokens come from other policies than that which is trained, uncorrected; or cannot."""
    for wrong, option in (
        (loss.rollout_correction == "none", "loss.rollout_correction=none; set it to tis or mis"),
        (advantage.dead_groups == "resample", "advantage.dead_groups=resample; set it to drop or keep"),
        (engine.tensor_parallel > 1, f"engine.tensor_parallel={engine.tensor_parallel}; set it to 1"),
    ):
        wrong = wrong and rollout.carry_over > 0
        require(not wrong, f"rollout.carry_over={rollout.carry_over} cannot go with {option}")
    require(
        engine.quantization == "none" or loss.rollout_correction != "none",
        f"engine.quantization={engine.quantization} samples from another policy than the one that is trained; set "
        "loss.rollout_correction=tis (or mis), or engine.quantization=none",
    )


def check_parallel(model: ModelConfig, advantage: AdvantageConfig, loss: LossConfig) -> None:
    """Raise ValueError where an algorithm needs whole rows on a rank, but context parallelism gives it parts."""
    known = names_of("losses", "NEED_WHOLE_ROWS") + names_of("rollout_correction", "NEED_WHOLE_ROWS")

    def combines(value: str) -> bool:  # a user's function may
        return is_own(value) or value in known

    for wrong, option in (
        (advantage.needs_critic, f"advantage.kind={advantage.kind}"),
        (combines(loss.kind), f"loss.kind={loss.kind}"),
        (combines(loss.aggregation), f"loss.aggregation={loss.aggregation}"),
        (combines(loss.rollout_correction), f"loss.rollout_correction={loss.rollout_correction}"),
        (loss.kl_coefficient and loss.kl_in == "reward", "loss.kl_in=reward"),
    ):
        require(
            model.context_parallel == 1 or not wrong,
            f"model.context_parallel={model.context_parallel} cannot go with {option}; set it to 1",
        )
