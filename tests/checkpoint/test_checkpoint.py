"""Real gloo ranks, real files, real SIGKILLs; "equal" means bit for bit."""

import hashlib
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.models import build_tiny_model
from helpers.ranks import mesh_of_one, ranks_of, run_ranks, run_ranks_until_killed
from helpers.records import logged
from helpers.saving import watch_files
from torch.distributed.tensor import DTensor

from arpo.batch import Row, collate
from arpo.checkpoint import Checkpoints
from arpo.checkpoint.checkpoints import verify
from arpo.checkpoint.export import full_weights, write_export
from arpo.checkpoint.manifest import MANIFEST
from arpo.checkpoint.snapshot import snapshot
from arpo.config.sections import ModelConfig, OptimConfig
from arpo.errors import UserError
from arpo.model import load_policy
from arpo.model.optim import build_optimizer, clip_grad_norm
from extras.export import export_checkpoint
from extras.export import main as export_command

OPTIM = OptimConfig(lr=1e-2)


def load(mesh, model: str | Path):
    policy = load_policy(ModelConfig(str(model), compute_dtype="float32"), mesh, device=torch.device("cpu"))
    return policy, build_optimizer(policy, OPTIM)


def train_step(policy, optimizer) -> None:
    """On a random row, for which every generator is drawn from."""
    ids = torch.randint(0, 380, (6,)).numpy()
    mask = np.array([1, 1, random.randrange(2), int(np.random.random() < 0.5)])
    logprobs, _ = policy(collate([Row(ids[:2], ids[2:], mask)]))
    (-logprobs.sum()).backward()
    clip_grad_norm(policy, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def digest(policy, optimizer) -> str:
    """Of this rank's parameters, optimizer state and random generators (which it draws from, on a copy)."""
    tensors = [p.detach() for _, p in policy.hf_parameters()]
    tensors += [value for p in policy.parameters() for value in optimizer.state.get(p, {}).values()]
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numpy().tobytes())
    sha.update(repr(random.getstate()).encode() + np.random.get_state()[1].tobytes())
    sha.update(torch.get_rng_state().numpy().tobytes())
    return sha.hexdigest()


def seed(ranks) -> None:
    random.seed(ranks.rank)
    np.random.seed(ranks.rank)
    torch.manual_seed(ranks.rank)


def train(ranks, model: str, folder: str, last_step: int, save_at: tuple[int, ...]) -> dict[int, str]:
    """From wherever the folder is to `last_step`; this rank's digest after every step, and where it began."""
    seed(ranks)
    policy, optimizer = load(ranks.mesh, model)
    checkpoints = Checkpoints(Path(folder), ranks, keep=3)
    begin = checkpoints.resume(policy, optimizer)
    assert checkpoints.progress == ({"reached": [begin, 0.1]} if begin else {})
    digests = {begin: digest(policy, optimizer)}
    for step in range(begin + 1, last_step + 1):
        train_step(policy, optimizer)
        digests[step] = digest(policy, optimizer)
        if step in save_at:
            checkpoints.write(step, snapshot(policy, optimizer), progress={"reached": [step, 0.1]})
    return digests


@pytest.fixture(scope="module")
def undisturbed(tiny_model_dir, tmp_path_factory):
    """[rank] -> step -> digest, of five steps without a save."""
    return run_ranks(2, train, str(tiny_model_dir), str(tmp_path_factory.mktemp("none")), 5, ())


@pytest.fixture(scope="module")
def saved(tiny_model_dir, tmp_path_factory, undisturbed) -> Path:
    """Checkpoints of steps 1, 2 and 3 of the same run."""
    folder = tmp_path_factory.mktemp("saved")
    digests = run_ranks(2, train, str(tiny_model_dir), str(folder), 3, (1, 2, 3))
    assert digests == [{step: rank[step] for step in range(4)} for rank in undisturbed]
    return folder


# -------------------------------------------------------------------------------------------------------- exact resume


def test_new_processes_continue_bit_for_bit(tiny_model_dir, saved, undisturbed, tmp_path):
    """Parameters, optimizer state and random generators, after the load and after every further step."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    resumed = run_ranks(2, train, str(tiny_model_dir), str(tmp_path), 5, ())
    assert resumed == [{step: rank[step] for step in (3, 4, 5)} for rank in undisturbed]


def test_a_run_that_was_never_saved_starts_at_step_0(tiny_model_dir, tmp_path):
    (tmp_path / "step_000007.tmp").mkdir()  # a kill during the first save
    with mesh_of_one() as mesh:
        assert Checkpoints(tmp_path / "absent", ranks_of(mesh)).resume(*load(mesh, tiny_model_dir)) == 0
        assert Checkpoints(tmp_path, ranks_of(mesh)).resume(*load(mesh, tiny_model_dir)) == 0


def whole_state(ranks, model: str, folder: str) -> tuple[int, dict[str, bytes]]:
    policy, optimizer = load(ranks.mesh, model)
    step = Checkpoints(Path(folder), ranks).resume(policy, optimizer)
    whole = {name: p.detach() for name, p in policy.hf_parameters()}
    for name, p in policy.hf_parameters():
        whole |= {f"{name} {key}": value for key, value in optimizer.state[p].items()}
    return step, {n: (t.full_tensor() if isinstance(t, DTensor) else t).numpy().tobytes() for n, t in whole.items()}


def test_another_world_size_loads_the_same_state(tiny_model_dir, saved):
    states = [state for size in (1, 2, 3) for state in run_ranks(size, whole_state, str(tiny_model_dir), str(saved))]
    assert len(states) == 6 and all(state == states[0] for state in states)
    assert states[0][0] == 3


def test_the_optimizers_settings_are_those_of_the_config_not_of_the_checkpoint(tiny_model_dir, saved):
    with mesh_of_one() as mesh:
        policy, _ = load(mesh, tiny_model_dir)
        optimizer = build_optimizer(policy, OptimConfig(weight_decay=0.3))
        Checkpoints(saved, ranks_of(mesh)).resume(policy, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


@pytest.mark.parametrize("edit", ["frozen weights", "another optimizer"])
def test_what_an_edited_run_would_not_load_is_one_line(tiny_model_dir, saved, edit):
    """verl #6320 and trl #78: weights frozen later were those of model.path again, and SGD went on without momentum."""
    with mesh_of_one() as mesh:
        policy, optimizer = load(mesh, tiny_model_dir)
        if edit == "frozen weights":
            policy.hf.get_input_embeddings().requires_grad_(False)
            optimizer = build_optimizer(policy, OptimConfig())
        for state in optimizer.state.values() if edit == "another optimizer" else ():
            del state["exp_avg_sq"]
        left = {"frozen weights": r"model\.model\.embed_tokens", "another optimizer": r"optimizer\..*exp_avg_sq"}[edit]
        with pytest.raises(UserError, match=rf"step_000003: {left}.* would not be loaded") as error:
            Checkpoints(saved, ranks_of(mesh)).resume(policy, optimizer)
    assert "\n" not in str(error.value)


def test_a_checkpoint_of_another_model_is_one_line(saved, tmp_path):
    other = build_tiny_model(tmp_path, tied=False)
    with (
        mesh_of_one() as mesh,
        pytest.raises(UserError, match=r"step_000003: cannot be loaded; are model\.path") as error,
    ):
        Checkpoints(saved, ranks_of(mesh)).resume(*load(mesh, other))
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------------ broken folders


def flip_tensor_bytes(folder: Path) -> None:
    """Four bytes in the middle of the largest file, which is tensor data."""
    file = max(folder.glob("*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    for i in range(len(data) // 2, len(data) // 2 + 4):
        data[i] ^= 0xFF
    file.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


# name -> (damage to a checkpoint folder, words of the logged reason)
DAMAGES = {
    "flipped bytes": (flip_tensor_bytes, "has size and checksum"),
    "truncated shard": (lambda f: truncate(f / "__0_0.distcp"), "__0_0.distcp has size and checksum"),
    "missing shard": (lambda f: (f / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "missing metadata": (lambda f: (f / ".metadata").unlink(), ".metadata is missing"),
    "missing random states": (lambda f: (f / "random_states.pt").unlink(), "random_states.pt is missing"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "no readable manifest"),
    "truncated manifest": (lambda f: truncate(f / MANIFEST), "no readable manifest"),
    "manifest is a list": (lambda f: (f / MANIFEST).write_text("[]"), "no readable manifest"),
    "manifest is binary": (lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe"), "no readable manifest"),
    "manifest of another step": (lambda f: shutil.copy(f.parent / "step_000001" / MANIFEST, f), "no readable manifest"),
}  # fmt: skip


def resume_each(ranks, model: str, folders: list[str]) -> list[tuple[int | str, str, list[str]]]:
    """Per folder: the step (or the error), the digest, and what was logged."""
    policy, optimizer = load(ranks.mesh, model)
    results = []
    for folder in folders:
        step: int | str
        with logged() as lines:
            try:
                step = Checkpoints(Path(folder), ranks).resume(policy, optimizer)
            except UserError as error:
                step = str(error)
        results.append((step, digest(policy, optimizer), lines))
    return results


@pytest.fixture(scope="module")
def damaged(tiny_model_dir, saved, tmp_path_factory):
    """name -> ([rank] -> (step, digest, log), folder)"""
    root = tmp_path_factory.mktemp("damaged")
    for name, (damage, _) in DAMAGES.items():
        shutil.copytree(saved, root / name)
        damage(root / name / "step_000003")
    for name, steps in (("two broken", (2, 3)), ("all broken", (1, 2, 3))):
        shutil.copytree(saved, root / name)
        for step in steps:
            flip_tensor_bytes(root / name / f"step_00000{step}")
    shutil.copytree(saved, root / "no pointer")
    (root / "no pointer" / "latest").write_text("step_000999\n")
    names = sorted(path.name for path in root.iterdir())
    per_rank = run_ranks(2, resume_each, str(tiny_model_dir), [str(root / name) for name in names])
    return {name: ([rank[i] for rank in per_rank], root / name) for i, name in enumerate(names)}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_broken_checkpoint_is_named_set_aside_and_the_one_before_is_loaded(damaged, undisturbed, name):
    ranks, folder = damaged[name]
    assert [(step, sha) for step, sha, _ in ranks] == [(2, rank[2]) for rank in undisturbed]
    [line] = ranks[0][2]  # only rank 0 speaks
    assert f"{folder}/step_000003 is skipped: " in line and DAMAGES[name][1] in line
    assert ranks[1][2] == []
    assert (folder / "step_000003.broken").is_dir() and not (folder / "step_000003").exists()


@pytest.mark.parametrize(("name", "begin", "num_lines"), [("two broken", 1, 2), ("no pointer", 3, 0)])
def test_two_broken_ones_in_a_row_are_both_skipped_and_a_wrong_pointer_misleads_nobody(
    damaged, undisturbed, name, begin, num_lines
):
    ranks, _ = damaged[name]
    assert [(step, sha) for step, sha, _ in ranks] == [(begin, rank[begin]) for rank in undisturbed]
    assert len(ranks[0][2]) == num_lines


def test_a_run_whose_checkpoints_are_all_broken_stops_instead_of_starting_over(damaged):
    ranks, folder = damaged["all broken"]
    for step, _, _ in ranks:
        assert "step_000003: " in step and "no other checkpoint is intact" in step
    assert sorted(p.name for p in folder.glob("step_*")) == ["step_000001", "step_000002", "step_000003"]


# ---------------------------------------------------------------------------------------------------------- the saving


def test_the_newest_stay_with_a_pointer_and_without_leftovers_and_what_the_user_has_put_there(tiny_model_dir, tmp_path):
    """Names that only begin like a checkpoint's: pytorch/torchtitan#4292 deleted them, k2-fsa/icefall#668 ended."""
    users = ["step_000004_keep", "step_000004_keep.tmp", "step_000005_keep.broken"]
    links = ["step_000007", "step_good"]
    for name in users:
        (tmp_path / name).mkdir()
    for name in links:
        (tmp_path / name).symlink_to("step_000004_keep")
    with mesh_of_one() as mesh:
        policy, optimizer = load(mesh, tiny_model_dir)
        checkpoints = Checkpoints(tmp_path, ranks_of(mesh), keep=2)
        (tmp_path / "step_000001.tmp").mkdir(parents=True)
        (tmp_path / "step_000001.tmp" / "half").write_text("")
        (tmp_path / "step_000002.broken").mkdir()
        for step in (9, 10, 11):
            assert checkpoints.write(step, snapshot(policy, optimizer)) == tmp_path / f"step_{step:06d}"
    assert {p.name for p in tmp_path.iterdir()} == {"latest", "step_000010", "step_000011", *users, *links}
    assert (tmp_path / "latest").read_text() == "step_000011\n"
    assert verify(tmp_path / "step_000010") is None and verify(tmp_path / "step_000011") is None


FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}


def save_and_die(ranks, model: str, folder: str, victim: int, event: int) -> int:
    """Train from step 3 to 4 and save; the victim is killed just before its event-th file operation of the save.

    Returns the number of file operations, if it survives them.
    """
    policy, optimizer = load(ranks.mesh, model)
    checkpoints = Checkpoints(Path(folder), ranks, keep=2)  # so that this save also prunes steps 1 and 2
    assert checkpoints.resume(policy, optimizer) == 3
    train_step(policy, optimizer)

    def is_in_the_folder(name: str, args: tuple) -> bool:
        return name in FILE_EVENTS and str(args[0]).startswith(folder)

    found = watch_files(is_in_the_folder, kill_at=event if ranks.rank == victim else 0)
    checkpoints.write(4, snapshot(policy, optimizer))
    return len(found)


@pytest.mark.slow
def test_a_kill_at_every_fifth_file_operation_of_a_save_loses_at_most_that_save(
    tiny_model_dir, saved, undisturbed, tmp_path
):
    shutil.copytree(saved, tmp_path / "whole")
    counts = run_ranks(2, save_and_die, str(tiny_model_dir), str(tmp_path / "whole"), -1, 0)
    assert sorted(p.name for p in (tmp_path / "whole").glob("step_*")) == ["step_000003", "step_000004"]
    points = [(0, event) for event in range(2, counts[0] + 1, 5)] + [(1, counts[1])]
    folders = []
    for victim, event in points:
        folder = tmp_path / f"{victim} {event}"
        shutil.copytree(saved, folder)
        run_ranks_until_killed(2, save_and_die, str(tiny_model_dir), str(folder), victim, event)
        assert verify(folder / "step_000003") is None, "the one before must survive"
        folders.append(folder)

    per_rank = run_ranks(2, resume_each, str(tiny_model_dir), [str(folder) for folder in folders])
    outcomes = set()
    for folder, first, second in zip(folders, *per_rank, strict=True):
        for rank, (step, sha, _) in enumerate((first, second)):
            assert step == first[0] and sha == undisturbed[rank][step], folder.name
        outcomes.add(first[0])
    assert outcomes == {3, 4}, "some kills must come before the rename, and some after"


# ---------------------------------------------------------------------------------------------------------- the export


def hf_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(40, 60)[None], use_cache=False).logits[0]


def export_after_resume(ranks, model: str, folder: str, out: str) -> None:
    policy, optimizer = load(ranks.mesh, model)
    Checkpoints(Path(folder), ranks).resume(policy, optimizer)
    for _ in range(2):  # the second replaces the first, as a run's next export replaces what the link points to
        write_export(full_weights(policy, model), Path(out) / "hf", source=model, link=Path(out) / "newest")


@pytest.fixture(scope="module")
def exported(tiny_model_dir, saved, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    run_ranks(2, export_after_resume, str(tiny_model_dir), str(saved), str(folder))
    return folder


def test_the_export_of_two_ranks_has_the_trained_weights(tiny_model_dir, saved, exported):
    from safetensors.torch import load_file

    with mesh_of_one() as mesh:
        policy, optimizer = load(mesh, tiny_model_dir)
        Checkpoints(saved, ranks_of(mesh)).resume(policy, optimizer)
        expected = {name: p.full_tensor() for name, p in policy.hf_parameters()}
    weights = load_file(exported / "hf" / "model.safetensors")
    assert weights.keys() == expected.keys() and all(torch.equal(weights[n], expected[n]) for n in weights)
    assert not torch.equal(hf_logits(exported / "hf"), hf_logits(tiny_model_dir))


def test_the_export_has_everything_that_the_source_has_and_a_link(tiny_model_dir, exported):
    from transformers import AutoTokenizer

    assert {p.name for p in tiny_model_dir.iterdir()} <= {p.name for p in (exported / "hf").iterdir()}
    assert sorted(p.name for p in exported.iterdir()) == ["hf", "newest"]
    assert len({p.stat().st_mode for p in (exported / "hf").iterdir()}) == 1  # of all files: what the umask says
    assert (exported / "newest").is_symlink() and (exported / "newest").resolve() == (exported / "hf").resolve()
    text = [{"role": "user", "content": "who wrote the book? <search>"}]
    source, export = (AutoTokenizer.from_pretrained(f) for f in (tiny_model_dir, exported / "newest"))
    assert source.apply_chat_template(text) == export.apply_chat_template(text)


def test_the_command_line_export_equals_the_ranks_export(tiny_model_dir, saved, exported, tmp_path, monkeypatch, capfd):
    arguments = [saved / "step_000003", tmp_path / "out", "--model", tiny_model_dir]
    monkeypatch.setattr(sys, "argv", ["export", *map(str, arguments)])
    export_command()
    assert capfd.readouterr() == (f"{tmp_path / 'out'}\n", "")
    assert torch.equal(hf_logits(tmp_path / "out"), hf_logits(exported / "hf"))


def test_an_export_that_cannot_be_right_is_refused_in_one_line_and_makes_no_folder(tiny_model_dir, saved, tmp_path):
    broken = shutil.copytree(saved / "step_000003", tmp_path / "step_000003")
    flip_tensor_bytes(broken)
    other = build_tiny_model(tmp_path / "other", tied=False)
    (tmp_path / "there").mkdir()
    for checkpoint, out, model, words in (
        (saved / "step_000003", "there", tiny_model_dir, "exists already"),
        (broken, "out", tiny_model_dir, "size and checksum"),
        (saved / "step_000003", "out", other, f"is {other} the model that the run"),
    ):
        with pytest.raises(UserError, match=words) as error:
            export_checkpoint(checkpoint, tmp_path / out, model=str(model))
        assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
    assert not list((tmp_path / "there").iterdir())


@pytest.mark.parametrize("dtype", ["dtype", "torch_dtype"])
def test_the_export_has_the_dtype_of_the_source(tiny_model_dir, saved, tmp_path, dtype):
    """Published configs say torch_dtype, transformers 5 writes dtype."""
    from safetensors.torch import load_file

    source = shutil.copytree(tiny_model_dir, tmp_path / "source")
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(config.replace('"dtype": "float32"', f'"{dtype}": "bfloat16"'))
    export_checkpoint(saved / "step_000003", tmp_path / "out", model=str(source))
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
