"""The algorithm's config sections, from the rollout to the update. The defaults are the paper's 7B reasoning recipe.

The docstring of a field is the field's `--help` text: unit, effect, special values. `Annotated` has the range of the
value, and the settings without which the value has no effect (config/facts.py). Each script composes its root config
from the sections here and in config/sections.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal

from arpo.config.facts import ALWAYS_MATTERS, MAY_CHANGE, OF_TRAINING, AtLeast, Between, Decides, Needs
from arpo.config.named import check_name, is_own, names_of, parameters_of, takes
from arpo.errors import UserError, require

# Needs, Decides and FACTS are explained in arpo/config/facts.py. Needs(option, *values): the annotated option has an
# effect only if `option` has one of these values, or, if none are given, any true value. `use` is what the error
# message proposes.
NEW_CONTEXTS = Needs("rollout.context", not_in=("append",), use="summary")
NOTES = Needs("rollout.context", not_in=("append", "strip_thoughts"), use="summary")


@dataclass(frozen=True)
class RolloutConfig:
    """The trajectories of a rollout: their number, length and tool calls."""

    group_size: Annotated[int, AtLeast(1), OF_TRAINING] = 16
    """Trajectories per prompt (upstream: n)."""
    max_response_tokens: Annotated[int, AtLeast(1)] = 4096
    """Budget of one trajectory: sampled tokens and tool results together."""
    max_tool_calls: Annotated[int, AtLeast(0)] = 3
    """Maximum number of tool calls in a trajectory. A further call is refused, and the model reads that it must answer
    (upstream: call_limit)."""
    max_calls_per_tool: tuple[str, ...] = ()
    """Maximum number of calls of a tool, like python=5. A further call is refused, but counts in max_tool_calls."""
    max_result_tokens: Annotated[int, AtLeast(1)] = 1024
    """Longer tool results are cut, with a visible mark. The results of one turn's calls share this budget."""
    answer_reserve_tokens: int = 256
    """Tokens at the end of max_response_tokens that tool results must leave free, so that an answer still fits."""
    context: str = "append"
    """What the model reads in each turn: append = the prompt and the conversation so far; strip_thoughts = the same
    without the thoughts of earlier turns; summary = beyond context_tokens it is asked for notes, and continues from the
    question and these notes; or custom, FILE.py:NAME. max_response_tokens limits each
    context (without its prompt), not the response. The contexts of a response are one trajectory, with one reward."""
    context_tokens: Annotated[int, AtLeast(0), NOTES] = 2048
    """summary: number of tokens after the prompt. Beyond it, the next tool result ends with the request for notes."""
    note_tokens: Annotated[int, AtLeast(1), NOTES] = 192
    """summary: most sampled tokens of a note. The request and the note must fit into answer_reserve_tokens."""
    max_trajectory_tokens: Annotated[int, AtLeast(1), NEW_CONTEXTS] = 16384
    """Tokens of all contexts of a trajectory together, including their prompts: the length of one row in training."""
    temperature: Annotated[float, Between(0, 2)] = 1.0
    """Sampling temperature: 0 = greedy, or from 0.01 to 2, the range of vLLM."""
    top_p: Annotated[float, Between(0, 1), Needs("rollout.temperature", use=1.0)] = 1.0
    """Nucleus sampling; 1 = off. With any other value tokens are not sampled from the policy itself. No correction sees
    this, because logprobs are computed before top_p."""
    dispatch: Annotated[
        Literal["fixed", "pull"], Decides(sampling=False, when=("advantage.dead_groups", "resample"))
    ] = "fixed"
    """fixed = each rank samples an equal share of the prompts; pull = a rank takes the next prompt from a common queue
    as long as it decodes fewer than engine.max_num_seqs trajectories, so a slow rank takes fewer prompts. The
    trajectories are the same."""
    carry_over: Annotated[int, AtLeast(0), OF_TRAINING] = 0
    """Training: a step ends when enough groups are finished. The other groups continue under the newer policy, for at
    most this number of steps; then the step waits for them. 0 = every step waits for all its groups."""

    @property
    def is_pulled(self) -> bool:
        """True if ranks take prompts from a common queue."""
        return self.dispatch != "fixed"

    @property
    def call_limits(self) -> dict[str, int]:
        """Tool -> limit. ("python=5",) -> {"python": 5}. Raises ValueError for another form."""
        limits = {}
        for text in self.max_calls_per_tool:
            name, _, limit = text.partition("=")
            if not name or not limit.isdecimal():
                raise ValueError(f"rollout.max_calls_per_tool: {text!r} is not of the form NAME=N, like python=5")
            limits[name] = int(limit)
        return limits

    @property
    def max_turns(self) -> int:
        """Upper bound on the turns of a trajectory: the first turn, one after each tool call, and (unless
        rollout.context=append) a note after each call. The turn after a call beyond max_tool_calls is not counted."""
        turns_per_call = 1 if self.context == "append" else 2  # strip_thoughts has no notes: the bound is too high
        return 1 + self.max_tool_calls * turns_per_call

    def __post_init__(self) -> None:
        _ = self.call_limits  # raises ValueError
        require(
            self.temperature <= 0 or self.temperature >= 0.01,
            f"rollout.temperature={self.temperature} is below 0.01, the lowest that vLLM samples with; set 0 (greedy)",
        )
        require(self.top_p > 0, f"rollout.top_p={self.top_p} keeps no token; 1 = off")
        check_name("rollout.context", self.context, "protocol/contexts", "CONTEXTS")


PER_NAT = 1.676
"""20 / ln 151,669. The released code sums the entropies of 20 tokens, and divides by ln V (Qwen2.5's vocabulary)."""
RELEASED_WEIGHT = round(0.2 * PER_NAT, 4)  # 0.3352 per nat
RELEASED_BUDGET_WEIGHT = round(0.5 * PER_NAT, 3)  # 0.838 per nat
SELECTORS = names_of("retrospective", "EXPANSIONS")
RULE_FORM = ("evidence", "cfg")
SELECTOR_FORM = ("group", "budget", "cfg", "rng")
"""Parameters of a custom rule, and of a custom retrospective selector. Further parameters must have defaults."""


def is_retrospective(selector: str) -> bool:
    """Return True if this branching.selector chooses forks after all trajectories of the group have ended."""
    if is_own(selector):
        return takes("branching.selector", selector, SELECTOR_FORM)
    return selector in SELECTORS


def rule_except(*names: str, use: tuple[str, ...] = ("arpo", "aepo")) -> Needs:
    """Return the need for a branching rule (it judges each tool result when it arrives) other than these."""
    return Needs("branching.selector", met=lambda s: s not in ("none", *names) and not is_retrospective(s), use=use)


BRANCHES = Needs("branching.selector", not_in=("none",), use=("arpo", "aepo"), unless_custom=True)
RETROSPECTIVE = Needs("branching.selector", met=is_retrospective, use=SELECTORS)
RULE = rule_except()
RULE_WITH_ENTROPY = rule_except("random")
RULE_WITH_PENALTY = rule_except("random", "arpo", use=("aepo",))


@dataclass(frozen=True)
class BranchingConfig:
    """When and where trajectories branch (ARPO sec. 3, AEPO sec. 3)."""

    FACTS = (RULE,)

    selector: Annotated[str, ALWAYS_MATTERS] = "arpo"
    """arpo = entropy rise after a tool result; aepo = the same with a penalty for consecutive branches; random = always
    `base`; none = never (plain GRPO); or custom, FILE.py:NAME. Retrospective, after all trajectories of the group have
    ended: tree_grpo = any turn; at2po = the turns with the least sure policy; top_h = the turns after a tool result
    with the highest entropy; or custom: a function whose first parameter is `group`."""
    expansion_rounds: Annotated[int, AtLeast(1), RETROSPECTIVE] = 2
    """Retrospective: number of rounds of forks, of equal size. Each round waits until all trajectories of the round
    before have ended, and can use them."""
    until_mixed: Annotated[bool, RETROSPECTIVE] = False
    """Retrospective: score the finished trajectories before each round. A group with different rewards gets no further
    trajectories, so only groups that teach nothing yet grow to rollout.group_size. The reward runs within the rollout,
    which waits for it."""
    num_initial_rollouts: Annotated[int, BRANCHES, Needs("branching.dynamic_budget", False)] = 8
    """Independent trajectories per prompt before branching; at most group_size; equal = plain GRPO."""
    threshold: Annotated[float | None, Between(0, 1), RULE_WITH_ENTROPY] = None
    """None = branch with probability P (released code); a number = branch if P is above it (the paper's tau)."""
    base: Annotated[float, Between(0, 1), RULE] = 0.5
    """alpha: P(branch) if the entropy does not change."""
    weight: Annotated[float, RULE_WITH_ENTROPY] = RELEASED_WEIGHT
    """beta (gamma in AEPO): change of P per nat of entropy change. Default: the released 0.2, converted. That applies
    to a sum over 20 tokens / ln V, and this option to the mean in nats (x 20 / ln 151,669)."""
    max_branches_per_turn: Annotated[int, AtLeast(1)] = 1
    """Children per decision (upstream: beam_size - 1)."""
    entropy_tokens: Annotated[int, AtLeast(1), Needs("branching.compat", "paper")] = 20
    """k: the entropy is the mean over this number of tokens after a tool result."""
    compat: Annotated[Literal["paper", "upstream"], ALWAYS_MATTERS] = "paper"
    """paper = the exact entropy of the tokens after the result. upstream = like the released code: the entropy of the
    tokens before the call (one round late), summed over the 10 most probable tokens; with aepo also the released rule.
    Only its count of consecutive branches differs: here each chain (a trajectory and its ancestors) has its own."""
    dynamic_budget: bool = False
    """AEPO: split the group between roots and branches by the entropies of one pre-monitoring trajectory."""
    budget_weight: Annotated[float, AtLeast(0), Needs("branching.dynamic_budget", use=True)] = RELEASED_BUDGET_WEIGHT
    """beta of the budget split's sigmoid, per nat. Default: the released 0.5, converted like `weight`."""
    consecutive_penalty: Annotated[float, AtLeast(0), RULE_WITH_PENALTY] = 0.05
    """AEPO: share by which P falls for each consecutive decision to branch, on the trajectory and its ancestors."""

    def __post_init__(self) -> None:
        check_name("branching.selector", self.selector, "branching", "RULES", *SELECTORS)
        forms = (RULE_FORM, SELECTOR_FORM)
        if is_own(self.selector) and not any(takes("branching.selector", self.selector, form) for form in forms):
            wanted = " or ".join(f"({', '.join(form)})" for form in forms)
            has = ", ".join(parameters_of("branching.selector", self.selector))
            raise UserError(f"branching.selector={self.selector} takes ({has}); it must be a function of {wanted}")
        is_released_gate = self.selector == "aepo" and self.compat == "upstream"
        require(
            self.base == 0.5 or not is_released_gate,
            f"branching.base={self.base} is ignored by aepo's released gate; drop it, or set branching.compat=paper",
        )


CRITICS = names_of("advantages", "CRITIC_ESTIMATORS")
CRITIC = Needs("advantage.kind", *CRITICS)
GROUPS = Needs("advantage.kind", not_in=CRITICS, use=names_of("advantages", "GROUP_ESTIMATORS"))


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages."""

    kind: str = "grpo"
    """grpo = compare a trajectory with the others of its prompt; gae = compare each token with a critic (PPO)."""
    tree: Annotated[str, GROUPS, BRANCHES] = "soft"
    """soft = every token gets its trajectory's advantage; hard = a token shared by several trajectories gets the mean
    of their advantages. Directly from rewards: node = a token gets its turn's value, the mean over the next turns in
    the tree, and at the end the normalised reward (AT2PO); node_parent = this value minus that of the turn before;
    inter_intra = the reward normalised over the prompt's group, plus normalised over its root's tree (Tree-GRPO)."""
    normalize: Annotated[Literal["group", "batch", "none"], GROUPS] = "group"
    """grpo: divisor of (reward - the group's mean): group = the group's standard deviation; batch = the standard
    deviation over all loss tokens of the step, after their mean is subtracted (REINFORCE++ with baseline); none = 1
    (Dr.GRPO)."""
    dead_groups: Annotated[Literal["keep", "drop", "resample"], GROUPS, Needs("loss.kl_in", "loss")] = "keep"
    """Groups with equal rewards: keep = their tokens count in the loss's mean; drop = leave them out; resample = leave
    them out, and sample further prompts until the step has enough other groups (DAPO)."""
    keep_variance: Annotated[float, Between(0, 1), GROUPS] = 1.0
    """Sort the groups by the standard deviation of their rewards, largest first. Train on the first ones, until they
    have this share of the sum of all standard deviations (RAGEN-2, arXiv 2604.06268: 0.9); 1 = all groups."""
    max_resample: Annotated[int, AtLeast(1), GROUPS, Needs("advantage.dead_groups", "resample")] = 2
    """resample: a step samples at most this number times data.num_prompts_per_step further prompts. If it still has too
    few groups, it is trained on these."""
    gamma: Annotated[float, Between(0, 1), CRITIC] = 1.0
    """gae: discount per sampled token. Tokens of tool results do not count."""
    lam: Annotated[float, Between(0, 1), CRITIC] = 1.0
    """gae: lambda; 1 = reward to go minus value, 0 = one-step temporal difference."""

    @property
    def needs_critic(self) -> bool:
        """True if tokens are compared with a critic's values, instead of trajectories with their group."""
        return self.kind in CRITICS

    def __post_init__(self) -> None:
        if not self.needs_critic:
            check_name("advantage.kind", self.kind, "advantages", "GROUP_ESTIMATORS", *CRITICS)
        check_name("advantage.tree", self.tree, "advantages", "TREE_CREDITS")
        require(self.keep_variance > 0, "advantage.keep_variance=0 would train on nothing; 1 keeps all groups")
        from_rewards = self.tree in names_of("advantages", "FROM_REWARDS")
        require(
            self.kind == "grpo" or self.needs_critic or not from_rewards,  # with a critic GROUPS refuses it
            f"advantage.tree={self.tree} starts from the rewards, so advantage.kind={self.kind} has no effect; "
            "set advantage.kind=grpo or advantage.tree=soft",
        )
        require(
            self.normalize != "batch" or not from_rewards,
            f"advantage.normalize=batch is ignored unless advantage.tree=soft or hard (it is {self.tree})",
        )


@dataclass(frozen=True)
class CriticConfig:
    """The critic of advantage.kind=gae: a second model with a value head, trained with `optim`, but at another rate."""

    FACTS = (CRITIC,)

    path: str = ""
    """Model folder of the critic at the start, with the policy's tokenizer; empty = model.path."""
    lr: Annotated[float, AtLeast(0)] = 1e-5
    """Peak learning rate of the critic."""
    warmup_steps: Annotated[int, AtLeast(0)] = 0
    """Number of steps at the start in which only the critic is trained."""


CLIPS = Needs("loss.kind", not_in=("reinforce",), use=("ppo", "gspo", "cispo"))
# losses in which a clipped token has no gradient; cispo clips only a constant weight
CLIPS_FROM_ABOVE = Needs("loss.kind", not_in=("cispo", "reinforce"), use=("ppo", "gspo"))
SHARES_RATIO = Needs("loss.kind", not_in=("ppo", "cispo", "reinforce"), use="gspo")
ENTROPY_BALANCED = Needs("loss.entropy_balanced_advantage", use=True)
REFERENCE = Needs("loss.kl_coefficient", use=0.001)
CORRECTIONS = names_of("rollout_correction", "ROLLOUT_CORRECTIONS")
CORRECTED = Needs("loss.rollout_correction", not_in=("none",), use=CORRECTIONS)
WITHOUT_LOW = ("none", "tis", "sequence_tis", "geometric_tis")
MASKS = Needs("loss.rollout_correction", not_in=WITHOUT_LOW, use=("mis", "sequence_mis", "geometric_mis"))


@dataclass(frozen=True)
class LossConfig:
    """The policy loss."""

    kind: str = "ppo"
    """ppo = clipped ratio of each token (also the loss of GRPO and AEPO); gspo = one clipped ratio per sequence (its
    paper: clip_low 3e-4, clip_high 4e-4, aggregation sequence_mean_token_mean); cispo = clipped ratio as a constant
    weight of the log-probability; reinforce = no ratio."""
    ratio_over: Annotated[Literal["sequence", "turn"], SHARES_RATIO] = "sequence"
    """gspo: tokens with a common ratio, from the mean of their log-ratios: all of the response, or of a turn (AT2PO:
    clip_low 3e-3, clip_high 4e-3)."""
    clip_low: Annotated[float, AtLeast(0), CLIPS] = 0.2
    """The ratio is clipped to at least 1 - clip_low."""
    clip_high: Annotated[float, AtLeast(0), CLIPS] = 0.2
    """The ratio is clipped to at most 1 + clip_high."""
    dual_clip: Annotated[float | None, Needs("loss.kind", not_in=("gspo", "cispo", "reinforce"), use="ppo")] = 3.0
    """ppo: a token with negative advantage has a loss of at most -advantage * dual_clip (c in dual-clip PPO). Above 1;
    None = no bound."""
    entropy_balanced_clipping: Annotated[bool, CLIPS_FROM_ABOVE] = False
    """AEPO: tokens clipped at the upper bound keep a gradient of fixed size, instead of none."""
    entropy_balanced_advantage: bool = False
    """AEPO: multiply advantages by max(1 + weight * z, 0), with z = (entropy - mean) / std over the mini-batch."""
    entropy_advantage_weight: Annotated[float, AtLeast(0), ENTROPY_BALANCED] = 0.2
    """AEPO: the weight in entropy_balanced_advantage."""
    entropy_advantage_max_z: Annotated[float | None, AtLeast(0), ENTROPY_BALANCED] = 2.0
    """AEPO: upper bound of z; None = no bound (the paper). If only a few tokens are uncertain, their z can exceed 10.
    If a fifth or more of the tokens are about equally uncertain, z stays below 2, and the bound has no effect."""
    entropy_coefficient: float = 0.0
    """Coefficient of the mean token entropy (nats), which is subtracted from the loss."""
    entropy_target: Annotated[float | None, AtLeast(0)] = None
    """Target of the mean token entropy (nats): below it each step raises entropy_coefficient by 0.001, above it each
    step lowers it, down to 0; None = entropy_coefficient is constant."""
    kl_coefficient: Annotated[float, AtLeast(0)] = 0.0
    """Weight of the KL to the reference policy; 0 = no reference is loaded."""
    kl_estimator: Annotated[str, REFERENCE] = "k3"
    """Estimator of a token's KL, with d = logprob - reference logprob: k1 = d (only for kl_in=reward: in the loss its
    mean gradient is 0); abs = |d|; k2 = d^2 / 2; k3 = exp(-d) + d - 1, at most 10."""
    kl_in: Annotated[Literal["loss", "reward"], REFERENCE] = "loss"
    """loss = add the KL to the policy loss; reward = subtract it from the reward before advantages are computed: with a
    critic from each token's reward, otherwise from the trajectory's, summed over its loss tokens."""
    reference: Annotated[str, REFERENCE] = ""
    """Model folder of the reference policy; empty = model.path, the policy before training."""
    offload_reference: Annotated[bool, MAY_CHANGE, REFERENCE] = False
    """Keep the reference's weights in CPU memory, and copy them to the GPU layer by layer (GPU only)."""
    aggregation: str = "token_mean"
    """Mean over the global mini-batch: token_mean = over all loss tokens; sequence_mean_token_sum = over trajectories,
    of the sum of their token losses; sequence_mean_token_mean = over trajectories, of the mean of these."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Denominator of the ratio: recompute = the trainer's forward pass before the update; rollout = vLLM's logprobs."""
    rollout_correction: Annotated[str, Needs("loss.old_logprobs", "recompute")] = "none"
    """Weight of each token's loss, with w = the trainer's / vLLM's probability before the update: none = 1; tis = w, at
    most correction_high; mis = w, but 0 outside [correction_low, correction_high]. sequence_tis and sequence_mis use
    the product of w over the response for all its tokens; geometric_tis and geometric_mis the geometric mean."""
    correction_low: Annotated[float, AtLeast(0), MASKS] = 0.5
    """mis, sequence_mis, geometric_mis: smaller weights become 0; from 0 to 1. For geometric_mis take 0.999, since a
    geometric mean is always close to 1."""
    correction_high: Annotated[float, Between(0, inf), CORRECTED] = 2.0
    """Largest weight, at least 1; inf = no bound. For a geometric mean take 1.001."""

    @property
    def has_kl_in_loss(self) -> bool:
        return self.kl_coefficient > 0 and self.kl_in == "loss"

    @property
    def has_kl_in_reward(self) -> bool:
        return self.kl_coefficient > 0 and self.kl_in == "reward"

    @property
    def is_corrected(self) -> bool:
        """True if the loss knows vLLM's probabilities: as the ratio's denominator, or through a correction."""
        return self.old_logprobs == "rollout" or self.rollout_correction != "none"

    def __post_init__(self) -> None:
        check_name("loss.kind", self.kind, "losses", "TOKEN_LOSSES")
        check_name("loss.kl_estimator", self.kl_estimator, "kl", "KL_ESTIMATORS")
        check_name("loss.aggregation", self.aggregation, "losses", "AGGREGATIONS")
        check_name(
            "loss.rollout_correction", self.rollout_correction, "rollout_correction", "ROLLOUT_CORRECTIONS", "none"
        )
        require(
            self.correction_low <= 1 <= self.correction_high,
            f"loss.correction_low={self.correction_low} and correction_high={self.correction_high} must enclose 1",
        )
