import math

import pytest
import torch
from helpers.models import cfg_of, random_rows
from helpers.ranks import ranks_of, run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from arpo.batch import collate
from arpo.checkpoint import Checkpoints
from arpo.checkpoint.snapshot import snapshot
from arpo.config.sections import OptimConfig
from arpo.model import load_policy
from arpo.model.optim import MOMENTS, build_optimizer, clip_grad_norm, lr_factor, set_learning_rate


def factors(num_updates: int, **options) -> list[float]:
    return [round(lr_factor(u, num_updates, OptimConfig(**options)), 4) for u in range(num_updates)]


COSINE = [round(0.5 * (1 + math.cos(math.pi * k / 8)), 4) for k in range(8)]


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [1.0] * 4),
        ({"warmup_ratio": 0.4}, [0.25, 0.5, 0.75, 1.0] + [1.0] * 6),
        ({"schedule": "linear"}, [1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "decay_ratio": 0.4}, [1.0] * 7 + [0.75, 0.5, 0.25]),
        ({"schedule": "linear", "warmup_ratio": 0.5, "decay_ratio": 1.0}, [0.5, 1.0, 1.0, 0.5]),
        ({"schedule": "cosine", "warmup_ratio": 0.2}, [0.5, 1.0, *COSINE]),  # half way down in the middle
        *(({"schedule": name, "warmup_ratio": 0.1}, [1.0]) for name in ("constant", "linear", "cosine")),
    ],
)
def test_the_rate_rises_over_the_warm_up_and_falls_over_the_decay_share(options, expected):
    assert factors(len(expected), **options) == expected


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_ends_at_the_minimum_and_stays_there(schedule):
    cfg = OptimConfig(schedule=schedule, min_lr_ratio=0.1)
    assert lr_factor(100, 100, cfg) == lr_factor(105, 100, cfg) == pytest.approx(0.1)
    assert 0.1 < lr_factor(99, 100, cfg) < 0.12


def test_the_rate_is_set_for_all_groups():
    model = nn.Linear(2, 2)
    cfg = OptimConfig(lr=0.5, warmup_ratio=1.0)
    optimizer = build_optimizer(model, cfg)
    assert set_learning_rate(optimizer, 0, 4, cfg) == 0.125
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_the_schedule_multiplies_the_rate_of_a_group_that_has_its_own():
    """flair #2641: the schedule overwrote the rates of all groups, and nothing told."""
    optimizer = build_optimizer(nn.Linear(2, 2), OptimConfig(lr=0.5))
    optimizer.param_groups[1]["lr"] = 0.25
    for update, rates in enumerate(([0.125, 0.0625], [0.25, 0.125], [0.375, 0.1875], [0.5, 0.25])):
        assert set_learning_rate(optimizer, update, 4, OptimConfig(lr=0.5, warmup_ratio=1.0)) == rates[0]
        assert [group["lr"] for group in optimizer.param_groups] == rates


def test_only_matrices_are_decayed():
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2), nn.LayerNorm(2))
    for p in model.parameters():
        p.data.fill_(1.0)
        p.grad = torch.zeros_like(p)
    build_optimizer(model, OptimConfig(lr=0.5, weight_decay=0.1)).step()
    values = {name: p.flatten()[0].item() for name, p in model.named_parameters()}
    assert values == pytest.approx({"0.weight": 0.95, "1.weight": 0.95, "1.bias": 1.0, "2.weight": 1.0, "2.bias": 1.0})


def steps(policy, optimizer, count: int) -> dict[str, torch.Tensor]:
    """The whole parameters after `count` optimizer steps."""
    for _ in range(count):
        (-policy(collate(random_rows()))[0].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().full_tensor().clone() for name, p in policy.hf_parameters()}


def described(optimizer) -> list[dict]:
    """Of each parameter: the names, types, dtypes and shapes of its state."""
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    kinds = [{k: (type(v), v.dtype, v.shape) for k, v in state.items()} for state in states]
    assert len(kinds) > 20
    return kinds


def test_it_is_fused_and_steps_sharded_parameters_like_the_plain_one_and_reads_its_checkpoints(
    tiny_model_dir, tmp_path, mesh
):
    """The fused kernel of the CPU here, under real FSDP2; a GPU has its own behind the same interface. Checkpoints of
    CPU runs before 2026-11-27 are plain ones."""
    outcomes, kinds = {}, {}

    def load(fused: bool):
        policy = load_policy(cfg_of(tiny_model_dir), mesh, device=torch.device("cpu"))
        optimizer = build_optimizer(policy, OptimConfig(lr=1e-2, weight_decay=0.1))
        assert all(group["fused"] for group in optimizer.param_groups)
        if not fused:
            groups = [{name: group[name] for name in ("params", "weight_decay")} for group in optimizer.param_groups]
            optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=optimizer.defaults["betas"])
        return policy, optimizer

    for fused in (False, True):
        policy, optimizer = load(fused)
        steps(policy, optimizer, 2)
        Checkpoints(tmp_path / str(fused), ranks_of(mesh)).write(2, snapshot(policy, optimizer))
        outcomes["fused" if fused else "plain"] = steps(policy, optimizer, 1)
        kinds[fused] = described(optimizer)
    for fused in (False, True):
        policy, optimizer = load(fused)
        assert Checkpoints(tmp_path / str(not fused), ranks_of(mesh)).resume(policy, optimizer) == 2
        outcomes[f"resumed as {fused}"] = steps(policy, optimizer, 1)
    assert kinds[False] == kinds[True]
    for outcome in outcomes.values():
        for name, parameter in outcomes["plain"].items():
            torch.testing.assert_close(outcome[name], parameter, rtol=1e-4, atol=1e-4, msg=name)


# ---- moments in host memory, of which test_kill_points.py has a whole run


def test_between_steps_the_moments_are_those_of_the_host_and_in_a_step_they_are_not():
    model = little_model()
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, offload=True))
    held = {p: dict(state) for p, state in optimizer.state.items()}
    seen = []

    def look(*_) -> None:
        seen.append([optimizer.state[p][name] is held[p][name] for p in held for name in MOMENTS])

    optimizer.register_step_pre_hook(look)  # the last one of all
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert seen == [[False] * 6] * 2
    for p in held:
        assert optimizer.state[p]["step"] == 2
        assert all(optimizer.state[p][name] is held[p][name] and held[p][name].any() for name in MOMENTS)


def clip_on_a_rank(ranks, poison: float) -> tuple[float | str, float, bool]:
    """(norm or error, norm after clipping, are the parameters as before?); rank 1 alone is poisoned."""
    model = little_model()
    fully_shard(model, mesh=ranks.mesh)
    before = [p.detach().full_tensor() for p in model.parameters()]
    inputs = torch.ones(2, 3)
    if ranks.rank == 1:
        inputs[0, 0] = poison
    (model(inputs).sum() * 3).backward()
    try:
        result: float | str = clip_grad_norm(model, 0.5)
    except FloatingPointError as error:
        result = str(error)
    after = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item()
    same = all(torch.equal(a, p.detach().full_tensor()) for a, p in zip(before, model.parameters(), strict=True))
    return result, after, same


def little_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, bias=False))


@pytest.mark.parametrize("off", [0.0, math.inf])
def test_a_norm_of_zero_clips_nothing(off):
    """strands-labs/robots PR#2028, VeOmni PR#939: elsewhere 0 is off; as a bound it would train nothing, in silence."""
    model = little_model()
    (model(torch.ones(2, 3)).sum() * 3).backward()
    before = [p.grad.clone() for p in model.parameters()]
    norm = clip_grad_norm(model, off)
    assert norm > 1 and all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


def test_clipping_uses_the_global_norm_on_every_rank():
    model = little_model()
    (model(torch.ones(2, 3)).sum() * 3).backward()  # both ranks have this batch, and FSDP averages
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert expected > 1
    for norm, after, _ in run_ranks(2, clip_on_a_rank, 1.0):
        assert norm == pytest.approx(expected, rel=1e-6) and after == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_on_one_rank_stops_every_rank_before_the_step(poison):
    for result, _, same in run_ranks(2, clip_on_a_rank, poison):
        assert "gradient norm is" in str(result) and same


def test_moments_are_there_before_the_first_step_and_change_none_of_its_digits():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    start = [p.detach().clone() for p in model.parameters()]
    ends = []
    for early in (True, False):
        with torch.no_grad():
            for p, value in zip(model.parameters(), start, strict=True):
                p.copy_(value)
        optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.1))
        assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in model.parameters())
        if not early:
            optimizer.state.clear()  # AdamW makes its own
        for step in range(3):
            for i, p in enumerate(model.parameters()):
                p.grad = torch.full_like(p, 0.3 * i - step)
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
        assert [v.dtype for v in optimizer.state[p].values()] == [torch.float32] * 3
    assert all(map(torch.equal, *ends))
