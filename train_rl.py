"""Agentic RL with real tools inside the rollout: GRPO, ARPO, AEPO and PPO are settings of this one script.

    torchrun --nproc_per_node 8 train_rl.py configs/qwen2.5_7b.yaml configs/arpo.yaml

A step, top to bottom in `main`:
rollout -> reward -> logprobs -> advantage -> update -> weight sync -> validate -> log -> save.
Every rank samples its share of the prompts with its own vLLM engine and trains its share of the tokens with FSDP2.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from arpo.config import checks
from arpo.config.evals import TrainingJudgeConfig
from arpo.config.load import load_or_exit, run_or_exit
from arpo.config.sections import DataConfig, EngineConfig, ModelConfig, OptimConfig, ProtocolConfig, RunConfig
from arpo.config.tools import ToolsConfig
from arpo.errors import UserError
from arpo.options import (
    AdvantageConfig,
    BranchingConfig,
    CriticConfig,
    LossConfig,
    RolloutConfig,
    TrainingRewardConfig,
    UpdateConfig,
)
from arpo.start.inputs import check_rl


@dataclass(frozen=True)
class RLConfig:
    """All knobs of train_rl.py. The defaults are the paper's 7B reasoning recipe (ARPO)."""

    SCRIPT: ClassVar[str] = "train_rl"
    run: RunConfig = field(default_factory=lambda: RunConfig(name="rl"))
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    branching: BranchingConfig = field(default_factory=BranchingConfig)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    reward: TrainingRewardConfig = field(default_factory=TrainingRewardConfig)
    judge: TrainingJudgeConfig = field(default_factory=TrainingJudgeConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def max_model_len(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def num_updates_per_step(self) -> int:
        return self.data.num_prompts_per_step // self.update.num_prompts_per_minibatch * self.update.num_epochs

    @property
    def critic_model(self) -> ModelConfig:
        return replace(self.model, path=self.critic.path or self.model.path, lora_rank=0)

    @property
    def critic_optim(self) -> OptimConfig:
        return replace(self.optim, lr=self.critic.lr)

    @property
    def reference_model(self) -> ModelConfig:
        path = self.loss.reference or self.model.path
        return replace(self.model, path=path, activation_checkpointing=False, lora_rank=0)

    @property
    def models(self) -> list[ModelConfig]:
        """All that read the trajectories: the policy; critic and reference where there are any."""
        critic = [self.critic_model] if self.advantage.needs_critic else []
        return [self.model, *critic, *([self.reference_model] if self.loss.kl_coefficient else [])]

    def __post_init__(self) -> None:
        checks.check_sizes(self.data, self.rollout, self.branching, self.update)
        checks.check_result_room(self.tools.search, self.rollout)
        checks.check_parallel(self.model, self.advantage, self.loss)
        checks.check_loss(self.loss)
        checks.check_terms(self.reward, self.judge, self.rollout, self.branching)
        checks.check_rewards_in_time(self.branching, self.advantage, self.loss)
        checks.check_queue(self.rollout, self.advantage, self.reward, self.judge)
        checks.check_sampling_policy(self.engine, self.loss, self.rollout, self.advantage)


# The config is read before torch is imported, so that --help and mistakes answer at once.
CONFIG = load_or_exit(RLConfig, check_rl) if __name__ == "__main__" else None

from pathlib import Path

from arpo import ranks
from arpo.branching_signal import BranchingSignal
from arpo.checkpoint import Saver
from arpo.config.model_folder import check_model_folder
from arpo.config.run_folder import check_run_folder
from arpo.data import PromptOrder, load_prompts, tokenize_prompts
from arpo.data.hub import local_file, source_of
from arpo.dispatch import ExpectedLengths
from arpo.engine import Engine
from arpo.engine.team import form_team
from arpo.log import RunLog
from arpo.log.charts import rl_charts
from arpo.log.nonfinite import report
from arpo.metrics import ToolHealth, console_text, distributions, memory_metrics, rollout_metrics, source_names, speeds
from arpo.model import load_policy, load_tokenizer
from arpo.model.attention import attention_backend, resolve_layout
from arpo.model.critic import fill_values, load_critic, update_critic
from arpo.model.optim import build_optimizer, set_learning_rate
from arpo.model.policy import check_companion
from arpo.protocol import Codec
from arpo.protocol.prompts import with_system_prompt
from arpo.sampling.carried_state import go_on_from, state_of
from arpo.sampling.carry_over import CarryOver
from arpo.sampling.drafts import Drafts
from arpo.sampling.sampler import Sampler
from arpo.sampling.scoring import Scoring
from arpo.sampling.validation import Guests, Validation
from arpo.selection import groups_to_train_on, num_to_sample, refills_from_queue
from arpo.start.memory import Job, check_memory, read_job
from arpo.tools import check_offered, make_codec, make_tools, system_prompt_for, take_restarts, tool_schemas
from arpo.trajectory import Group, Metrics, Prompt
from arpo.update import (
    fill_advantages,
    fill_old_logprobs,
    fill_ref_logprobs,
    first_update_fills,
    make_minibatches,
    update_policy,
)


def main(cfg: RLConfig) -> None:
    timeouts = cfg.run.peer_timeout_minutes, cfg.run.silence_timeout_s
    dist = ranks.init(*timeouts, shard_size=cfg.model.shard_size, context_parallel=cfg.model.context_parallel)
    dist.log_devices(attention_backend(cfg.model, dist.device))

    # ---- everything that can be wrong is found before a model is loaded
    run_dir = Path(cfg.run.dir) / cfg.run.name
    check_run_folder(cfg.run, cfg)
    num_prompts = cfg.data.num_prompts_per_step
    dist.check_multiple(num_prompts, "data.num_prompts_per_step")
    check_model_folder(cfg.model.path, max_model_len=cfg.max_model_len)
    check_memory(job_of(cfg, num_shards=dist.mesh.shape[-1]), dist.device)
    tokenizer = load_tokenizer(cfg.model.path)
    for option, path in {"critic.path": cfg.critic.path, "loss.reference": cfg.loss.reference}.items():
        if path:
            check_companion(path, tokenizer, max_model_len=cfg.max_model_len, option=option)
    schemas = tool_schemas(cfg.tools)
    codec = make_codec(tokenizer, cfg.protocol, schemas, enable_thinking=cfg.model.enable_thinking)
    codec.check_result_room(cfg.rollout.max_result_tokens)
    train_prompts = load_and_tokenize(cfg.data.train, cfg.data, codec, schemas)
    valid_prompts = load_and_tokenize(cfg.data.valid, cfg.data, codec, schemas)[: cfg.data.num_valid_prompts or None]
    order = PromptOrder(len(train_prompts), num_prompts, cfg.run.seed, option="data.num_prompts_per_step")
    num_steps = cfg.run.num_steps or cfg.run.num_epochs * order.steps_per_epoch
    num_updates, max_norm = num_steps * cfg.num_updates_per_step, cfg.optim.max_grad_norm
    team = form_team(dist, cfg.engine.tensor_parallel, cfg.model.path)
    score = Scoring(cfg.reward, cfg.judge, team, codec, cfg.rollout.max_response_tokens, folder=run_dir)
    score.try_on(train_prompts[0], selector=cfg.branching.selector)
    tools = team.tool_runner(dist.together(lambda: make_tools(cfg.tools)))
    update_cfg = resolve_layout(cfg.update, cfg.models, cfg.rollout.group_size, dist.device)
    saver = Saver(cfg.run, dist, source=cfg.model.path)

    # ---- policy, optimizer, engine; the trainer first, so that vLLM finds the memory that is left
    ranks.seed_everything(cfg.run.seed + dist.rank)
    policy = load_policy(cfg.model, dist.mesh, device=dist.device, seed=cfg.run.seed)
    optimizer = build_optimizer(policy, cfg.optim)
    critic = critic_optimizer = reference = None
    if cfg.advantage.needs_critic:
        critic = load_critic(cfg.critic_model, dist.mesh, device=dist.device)
        critic_optimizer = build_optimizer(critic, cfg.critic_optim)
    if cfg.loss.kl_coefficient:
        place = {"device": dist.device, "offload": cfg.loss.offload_reference}
        reference = load_policy(cfg.reference_model, dist.mesh, **place).requires_grad_(False)
    done_steps = saver.resume(policy, optimizer, critic, critic_optimizer)
    score.go_on_from(saver.progress.get("judge_calls", 0))
    num_drawn = saver.progress.get("num_drawn", done_steps * num_prompts)  # of the data, since the run began
    sizes = {"max_model_len": cfg.max_model_len, "seed": cfg.run.seed + team.index}
    engine = Engine(cfg.model.path, cfg.engine, load_weights=False, **sizes)
    engine.sync_weights(policy.hf_parameters())
    looks = {"charts": rl_charts(cfg.rollout.temperature), "keep_dumps": cfg.run.keep_dumps}
    log = RunLog(run_dir, cfg, is_main=dist.is_main, resume_step=done_steps, trackers=cfg.run.trackers, **looks)
    log.line(f"{len(train_prompts)} prompts, {num_steps} steps, {update_cfg.layout} layout, from step {done_steps}")
    if warning := checks.half_chosen_aepo(cfg.branching, cfg.loss):
        log.line(warning)
    lengths = ExpectedLengths(cfg.rollout, saver.progress.get("lengths", {}))
    drafts = Drafts(run_dir / "drafts", cfg.rollout, saver.progress.get("drafts", {}))
    sampler = Sampler(engine, tools, codec, team, log, cfg.run.seed, score, cfg.engine.max_num_seqs, lengths, drafts)
    carried = go_on_from(CarryOver(sampler, cfg.rollout, cfg.branching, num_prompts), saver.rank_files, train_prompts)
    validation = Validation(sampler, log, valid_prompts, cfg.run, cfg.rollout, cfg.branching, num_steps)
    validation.before_training(done_steps)

    health, sources = ToolHealth(), source_names(train_prompts)
    signal = BranchingSignal(cfg.branching, saver.progress.get("signal", ()))
    progress = log.progress(num_steps, "step", done=done_steps)
    stop = ranks.StopRequest()
    for step in range(done_steps + 1, num_steps + 1):
        timers, metrics, num_drawn_before = ranks.Timers(), Metrics(), num_drawn - carried.num_behind

        # ---- rollout and reward; until enough groups can teach (dead_groups=resample) or are whole (carry_over)
        sampled: list[Group] = []
        num_prefilled = engine.stats.prefilled_tokens
        while count := num_to_sample(sampled, num_prompts, cfg.advantage, cfg.rollout):
            drawn = order.queue(num_drawn, carried.num_to_draw(count, num_steps - step + 1))
            name = f"{step}.{len(sampled)}" if sampled else f"{step}"
            prompts = [train_prompts[i] for i, _ in drawn]
            more, num_cut_off = sample(carried, prompts, cfg, timers, name, signal, validation.begin())
            sampled, num_drawn = sampled + more, carried.num_drawn_after(drawn, more, num_drawn)
        with timers("validate"):
            validation.end()
        groups = groups_to_train_on(sampled, num_prompts, cfg.advantage)
        metrics.sum("tokens/prefilled", (engine.stats.prefilled_tokens - num_prefilled) * team.is_first)
        with timers("sync"):
            engine.sleep()
        share = sampled[dist.rank :: dist.world_size]  # each rank counts its share once
        metrics.merge(rollout_metrics(share, sources, take_restarts(tools.tools), step))
        if cfg.advantage.dead_groups == "resample":
            metrics.sum("group/resampled_prompts", (len(sampled) - num_prompts) * dist.is_main)
            metrics.sum("group/cut_off", num_cut_off * dist.is_main)
            if len(groups) < num_prompts:
                log.line(f"step {step}: only {len(groups)} groups to train on, after {len(sampled)} prompts")
        signal_values = signal.add(sampled)
        lengths.add(sampled)
        drafts.add(step, sampled, dist)

        # ---- mini-batches of whole groups, and what the models say of their tokens before the update
        # (none where a tool failed so often that the batch would teach to do without it)
        may_train = health.may_train(sampled, num_drawn_before)
        minibatches = make_minibatches(groups, update_cfg, cfg.advantage, dist) if may_train else []
        for warning in filter(None, (signal.warning, health.warning)):
            log.line(f"step {step}: {warning}")
        with timers("old_logprobs"):
            for minibatch in minibatches[1:] if first_update_fills(cfg.loss) else minibatches:
                metrics.merge(fill_old_logprobs(policy, minibatch.micros, cfg.loss, cfg.rollout.temperature))
        if reference:
            with timers("reference"):
                for minibatch in minibatches:
                    fill_ref_logprobs(reference, minibatch.micros, cfg.rollout.temperature)
        if critic:
            with timers("values"):
                for minibatch in minibatches:
                    fill_values(critic, minibatch.micros)

        # ---- advantages; update: one optimizer step per mini-batch (while a critic warms up, the policy stays)
        metrics.merge(fill_advantages(groups, minibatches, cfg.advantage, cfg.loss, dist))
        with timers("update"):
            try:
                for number, minibatch in enumerate(minibatches * cfg.update.num_epochs):
                    update = (step - 1) * cfg.num_updates_per_step + number
                    if critic:
                        set_learning_rate(critic_optimizer, update, num_updates, cfg.critic_optim)
                        metrics.merge(update_critic(critic, critic_optimizer, minibatch.micros, max_norm, dist))
                    if step > cfg.critic.warmup_steps:
                        metrics.mean("optim/lr", set_learning_rate(optimizer, update, num_updates, cfg.optim))
                        how = cfg.loss, cfg.rollout.temperature, max_norm, dist
                        is_first = number == 0
                        metrics.merge(update_policy(policy, optimizer, minibatch.micros, *how, is_first=is_first))
            except FloatingPointError as error:
                log.trajectories(step, sampled, kind="nonfinite")
                raise report(error, f"step {step}, mini-batch {number + 1}", minibatch.micros, run_dir, dist) from error

        # ---- the engine samples from the new policy
        with timers("sync"):
            engine.wake_up()
            engine.sync_weights(policy.hf_parameters())

        # ---- validate, log, save; in this order, so that no checkpoint is ahead of the log
        is_last = step == num_steps
        with timers("validate"):
            values = validation.after(step)
        metrics.merge(memory_metrics(dist.device))
        values |= signal_values | dist.step_times(timers) | dist.reduce_metrics(metrics).values() | score.end_step()
        log.scalars(step, values | speeds(values, dist.world_size), distributions(sampled))
        if cfg.run.dump_every and (is_last or step % cfg.run.dump_every == 0):
            log.trajectories(step, sampled)
        progress.at(step, console_text(values), keep="valid/accuracy" in values)
        is_final = is_last or health.must_stop or stop.agreed(dist)
        if is_final or (cfg.run.save_every and step % cfg.run.save_every == 0):
            made = {"num_drawn": health.go_on_from(num_drawn), "judge_calls": score.num_judge_calls}
            made |= {"signal": signal.state, "lengths": lengths.state, "drafts": drafts.state}
            saver.save(step, made, None if health.must_stop else state_of(carried), is_final=is_final)
            drafts.prune(saver.oldest_progress.get("drafts", {}))
        if health.must_stop:
            raise UserError(str(health))
        if is_final:
            break

    progress.close()
    log.finish()
    for part in (tools, score, engine, dist):
        part.close()


def job_of(cfg: RLConfig, num_shards: int) -> Job | None:
    """Return what decides the memory of a GPU, one of `num_shards` that share a copy of the model."""
    critic = cfg.critic_model.path if cfg.advantage.needs_critic else ""
    reference = cfg.reference_model.path if cfg.loss.kl_coefficient and not cfg.loss.offload_reference else ""
    sizes = num_shards, cfg.update.max_tokens_per_microbatch, cfg.engine, cfg.max_model_len
    return read_job(cfg.model, *sizes, critic_path=critic, reference_path=reference)


def load_and_tokenize(file: str, cfg: DataConfig, codec: Codec, schemas: dict | None = None) -> list[Prompt]:
    prompts = load_prompts(local_file(file), source=source_of(file)) if file else []
    check_offered(prompts, codec.tools, file)
    system_prompt = system_prompt_for(cfg.system_prompt, schemas or codec.tools, form=codec.format)

    def render(messages: list[dict[str, str]], *tools: tuple[str, ...]) -> list[int]:
        return codec.render_prompt(with_system_prompt(messages, system_prompt), *tools)

    return tokenize_prompts(prompts, render, cfg.max_prompt_tokens, cfg.overlong, file)


def sample(
    source: CarryOver,
    prompts: list[Prompt],
    cfg: RLConfig,
    timers: ranks.Timers,
    name: str,
    signal: BranchingSignal,
    guests: Guests | None,
) -> tuple[list[Group], int]:
    """Return the scored groups of the prompts on every rank, in order, and the number of groups that were cut off.

    Each team of ranks samples and scores its part. `name` is the rollout's: the step, and what tells it from others.
    `guests`: the validation beside it, if any.
    """
    with timers("rollout"):
        names = {"step": name, "description": f"step {name} rollout", "on_group": source.sampler.score.on_group}
        names["num_wanted"] = cfg.data.num_prompts_per_step if refills_from_queue(cfg.advantage, cfg.rollout) else 0
        share = source(prompts, cfg.rollout, cfg.branching, statistics=signal.statistics, guests=guests, **names)
    with timers("reward"):
        source.sampler.score(share.groups if source.team.is_first else [])
    with timers("exchange"):
        return source.exchange(share)


if __name__ == "__main__":
    run_or_exit(main, CONFIG)
