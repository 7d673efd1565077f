"""Files of the released code's layout, written by real FSDP ranks (or cut by hand where a test needs to break them)."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers.models import build_tiny_model
from helpers.ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from arpo.errors import UserError
from extras.verl_import import import_verl, main


def hf_state(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def write_rank(ranks, model: str, actor: str, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """As the released code saves: each rank its own shards, a tied head twice."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in hf.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(hf, mesh=mesh)
    torch.save(hf.state_dict(), Path(actor) / f"model_world_size_{ranks.world_size}_rank_{ranks.rank}.pt")


def actor_folder(folder: Path, model: Path) -> Path:
    """config and tokenizer lie in huggingface/, as there."""
    ignore = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(model, folder / "huggingface", ignore=ignore)
    return folder


@pytest.fixture(scope="module", params=["fsdp of 3", "ddp x fsdp", "untied"])
def actor(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("actor")
    model = build_tiny_model(folder / "model", tied=request.param != "untied")
    actor = actor_folder(folder / "actor", model)
    shape, names = ((2, 2), ("ddp", "fsdp")) if request.param == "ddp x fsdp" else ((3,), ("fsdp",))
    shape = (1,) if request.param == "untied" else shape
    run_ranks(torch.Size(shape).numel(), write_rank, str(model), str(actor), shape, names)
    return actor, model


def test_the_files_of_all_ranks_become_the_model_they_were_cut_from(actor, tmp_path, monkeypatch, capsys):
    folder, model = actor
    monkeypatch.setattr(sys, "argv", ["verl_import", str(folder), str(tmp_path / "hf")])
    main()
    assert capsys.readouterr().out == f"{tmp_path / 'hf'}\n"
    ours, expected = hf_state(tmp_path / "hf"), hf_state(model)
    assert ours.keys() == expected.keys() and all(torch.equal(ours[n], expected[n]) for n in ours)
    assert (tmp_path / "hf" / "chat_template.jinja").exists() and (tmp_path / "hf" / "generation_config.json").exists()


@pytest.fixture
def plain(tiny_model_dir, tmp_path) -> Path:
    """Two ranks' plain shards, cut by rows; norms (whole numbers of which fit no cut) are whole on both."""
    actor = actor_folder(tmp_path / "actor", tiny_model_dir)
    state = load_file(tiny_model_dir / "model.safetensors")
    for rank in range(2):
        part = {n: t if t.ndim == 1 else t.chunk(2)[rank].clone() for n, t in state.items()}
        torch.save(part, actor / f"model_world_size_2_rank_{rank}.pt")
    return actor


def test_plain_shards_are_joined_by_rows_and_whole_tensors_taken_once(plain, tiny_model_dir, tmp_path):
    import_verl(plain, tmp_path / "hf")
    ours, expected = (load_file(f / "model.safetensors") for f in (tmp_path / "hf", tiny_model_dir))
    assert ours.keys() == expected.keys() and all(torch.equal(ours[n], expected[n]) for n in ours)


class Harmful:
    def __reduce__(self):
        return print, ("this code must not run",)


def edit(actor: Path, rank: int, change) -> None:
    file = actor / f"model_world_size_2_rank_{rank}.pt"
    state = torch.load(file)
    change(state)
    torch.save(state, file)


NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
DAMAGES = {
    "no files": (lambda a: [f.unlink() for f in a.glob("*.pt")], "no model_world_size_W_rank_R.pt"),
    "a rank is missing": (lambda a: (a / "model_world_size_2_rank_1.pt").unlink(), "size_2_rank_1.pt is missing"),
    "two runs": (lambda a: torch.save({}, a / "model_world_size_4_rank_0.pt"), r"world sizes \[2, 4\] lie together"),
    "half a file": (
        lambda a: (a / "model_world_size_2_rank_0.pt").write_bytes(b"PK\x03\x04"),
        "cannot be read as weights",
    ),
    "code in a pickle": (lambda a: edit(a, 1, lambda s: s.update(x=Harmful())), "cannot be read as weights"),
    "a weight is missing": (lambda a: edit(a, 1, lambda s: s.pop(UP)), f"{UP} is not in model_world_size_2_rank_1"),
    "an unknown weight": (lambda a: edit(a, 0, lambda s: s.update(v_head=torch.ones(1))), "v_head is not in the model"),
    "another shape": (lambda a: edit(a, 1, lambda s: s.update({UP: s[UP][:5]})), r"has shape \(69, 64\), the config"),
    "no config": (lambda a: shutil.rmtree(a / "huggingface"), "no config.json; pass --model"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_wrong_is_one_line_and_nothing_is_written(plain, tmp_path, name, capfd):
    damage, words = DAMAGES[name]
    damage(plain)
    with pytest.raises(UserError, match=words) as error:
        import_verl(plain, tmp_path / "hf")
    assert "\n" not in str(error.value) and "must not run" not in capfd.readouterr().out
    assert not (tmp_path / "hf").exists() and not (tmp_path / "hf.tmp").exists()


def test_shards_of_another_number_of_ranks_are_refused(actor, tmp_path):
    """Renamed files: what they hold says how many there must be."""
    folder, model = actor
    first = min(folder.glob("*.pt"))
    renamed = actor_folder(tmp_path / "actor", model)
    for rank in range(2):
        shutil.copy(first, renamed / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(UserError, match=r"was cut for \d ranks, and here are 2 files"):
        import_verl(renamed, tmp_path / "hf")
