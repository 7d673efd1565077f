"""Files of strangers run no code: every loader is handed one that would leave a mark."""

import contextlib
import io
import json
import os
import pathlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.models import build_tiny_model
from helpers.ranks import mesh_of_one, ranks_of
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from arpo.batch import Row, collate
from arpo.checkpoint import Checkpoints
from arpo.checkpoint.checkpoints import RANDOM_STATES
from arpo.checkpoint.export import source_dtype, write_hf
from arpo.checkpoint.manifest import MANIFEST, size_and_checksum
from arpo.checkpoint.snapshot import snapshot
from arpo.config.sections import ModelConfig, OptimConfig
from arpo.engine.team import check_split
from arpo.engine.weight_sync import expected_parameters
from arpo.errors import UserError
from arpo.model import load_policy, load_tokenizer
from arpo.model.loading import build_on_meta
from arpo.model.optim import build_optimizer
from arpo.sft.token_store import ConversationRows
from arpo.start.memory import sizes_of
from extras.export import export_checkpoint


class Payload:
    """Unpickling it makes the folder `mark`."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path):
    """What the payload would make. It works: a plain unpickler runs it."""
    works = tmp_path / "works"
    pickle.loads(pickle.dumps(Payload(works)))
    assert works.is_dir()
    return tmp_path / "mark"


def make(mesh, model: Path):
    policy = load_policy(ModelConfig(str(model), compute_dtype="float32"), mesh, device=torch.device("cpu"))
    return policy, build_optimizer(policy, OptimConfig(lr=1e-2))


@pytest.fixture
def checkpoint(tiny_model_dir, tmp_path) -> Path:
    with mesh_of_one() as mesh:
        policy, optimizer = make(mesh, tiny_model_dir)
        ids = np.arange(6)
        policy(collate([Row(ids[:2], ids[2:], np.ones(4, int))]))[0].sum().backward()
        optimizer.step()
        return Checkpoints(tmp_path / "checkpoints", ranks_of(mesh)).write(1, snapshot(policy, optimizer))


def sign(folder: Path) -> None:
    """Make the manifest fit the files, as whoever doctored them would."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"] = {name: size_and_checksum(folder / name) for name in manifest["files"]}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def doctor_metadata(folder: Path, change) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    metadata.storage_meta = None
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def code_in_the_metadata(folder: Path, mark: Path) -> None:
    doctor_metadata(folder, lambda metadata: setattr(metadata, "planner_data", Payload(mark)))


def a_metadata_that_is_none(folder: Path, mark: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps({"tensors": 0}))


def a_tensor_declared_as_bytes(folder: Path, mark: Path) -> None:
    def change(metadata):
        name = next(iter(metadata.state_dict_metadata))
        payload = io.BytesIO()
        torch.save(Payload(mark), payload)
        (folder / "__0_0.distcp").write_bytes(payload.getvalue())
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        for index, entry in metadata.storage_data.items():
            if index.fqn == name:
                entry.offset, entry.length = 0, len(payload.getvalue())

    doctor_metadata(folder, change)


def code_in_the_tensors(folder: Path, mark: Path) -> None:
    payload = io.BytesIO()
    torch.save(Payload(mark), payload)

    def change(metadata):
        for entry in metadata.storage_data.values():
            entry.offset, entry.length = 0, len(payload.getvalue())

    (folder / "__0_0.distcp").write_bytes(payload.getvalue())
    doctor_metadata(folder, change)


def tensors_of_another_folder(folder: Path, mark: Path) -> None:
    def change(metadata):
        for entry in metadata.storage_data.values():
            entry.relative_path = "../../elsewhere.distcp"

    doctor_metadata(folder, change)


DOCTORED = {
    code_in_the_metadata: r"more than tensors \(posix\.mkdir\)",
    a_metadata_that_is_none: r"more than tensors \(dict\)",
    a_tensor_declared_as_bytes: r"more than tensors \(torch\.distributed\.checkpoint\.metadata\.BytesStorageMetadata\)",
    code_in_the_tensors: "cannot be loaded",
    tensors_of_another_folder: r"points out of the folder: '\.\./\.\./elsewhere\.distcp'",
}


@pytest.mark.parametrize("doctor", DOCTORED, ids=lambda doctor: doctor.__name__)
def test_a_doctored_checkpoint_runs_no_code_at_an_export_or_a_resume(
    checkpoint, tiny_model_dir, mark, tmp_path, doctor
):
    doctor(checkpoint, mark)
    sign(checkpoint)
    with pytest.raises(UserError, match=DOCTORED[doctor]):
        export_checkpoint(checkpoint, tmp_path / "hf", model=str(tiny_model_dir))
    assert not mark.exists() and not (tmp_path / "hf").exists()
    with mesh_of_one() as mesh, pytest.raises(UserError, match=DOCTORED[doctor]) as error:
        Checkpoints(checkpoint.parent, ranks_of(mesh)).resume(*make(mesh, tiny_model_dir))
    assert not mark.exists() and "\n" not in str(error.value)


def test_a_checkpoint_of_python_3_13_is_read(checkpoint, tiny_model_dir, monkeypatch):
    """Only there the classes of pathlib are in pathlib._local, also in a pickle (python/cpython 133789)."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    monkeypatch.setitem(sys.modules, "pathlib._local", pathlib)
    monkeypatch.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    monkeypatch.undo()
    sign(checkpoint)
    with mesh_of_one() as mesh:
        assert Checkpoints(checkpoint.parent, ranks_of(mesh)).resume(*make(mesh, tiny_model_dir)) == 1


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def manifest(text: str) -> Callable[[Path], int]:
    return lambda path: path.write_text(text)


def a_sparse_terabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "make_it", "problem"),
    [
        ("__0_0.distcp", link("/dev/zero"), "is no plain file"),
        ("__0_0.distcp", os.mkfifo, "is no plain file"),
        ("__0_0.distcp", link("/etc/hostname"), "is no plain file"),
        ("__0_0.distcp", a_sparse_terabyte, "has size and checksum"),
        ("unlisted", os.mkfifo, "is no plain file"),
        (MANIFEST, link("/dev/zero"), "no readable manifest"),
        (MANIFEST, os.mkfifo, "no readable manifest"),
        (MANIFEST, a_sparse_terabyte, "no readable manifest"),
        (MANIFEST, manifest('{"step": 1, "files": {"/dev/zero": [0, 0]}}'), "/dev/zero is missing"),
        (MANIFEST, manifest('{"step": 1, "files": {"../latest": [0, 0]}}'), "latest is missing"),
        (MANIFEST, manifest('{"step": 1, "files": {"a": 5}}'), "no readable manifest"),
        (MANIFEST, manifest("[" * 100_000), "no readable manifest"),
    ],
)
def test_a_checkpoint_is_made_of_plain_files_of_its_folder_and_of_their_sizes(checkpoint, name, make_it, problem):
    (checkpoint / name).unlink(missing_ok=True)
    make_it(checkpoint / name)
    with pytest.raises(UserError, match=problem):
        export_checkpoint(checkpoint, checkpoint.parent / "hf")


def test_doctored_random_states_run_no_code(checkpoint, tiny_model_dir, mark):
    torch.save([Payload(mark)], checkpoint / RANDOM_STATES)
    sign(checkpoint)
    with mesh_of_one() as mesh, pytest.raises(UserError, match=f"{RANDOM_STATES}: cannot be read"):
        Checkpoints(checkpoint.parent, ranks_of(mesh)).resume(*make(mesh, tiny_model_dir))
    assert not mark.exists()


def test_a_doctored_token_store_runs_no_code(mark, tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([Payload(mark)]), allow_pickle=True)
    manifest = {"origin": {}, "rows_per_part": [1], "num_dropped": 0, "defects": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="allow_pickle"):
        ConversationRows(tmp_path)
    assert not mark.exists()


LOADERS = {
    "policy": lambda model: build_on_meta(model, "sdpa"),
    "tokenizer": load_tokenizer,
    "export": lambda model: write_hf([], Path(model).parent / "hf", model),
    "dtype": source_dtype,
    "team": lambda model: check_split(model, 2),
    "engine": expected_parameters,
    "memory": sizes_of,
}


@pytest.mark.parametrize("own", ["own", "clip"])  # of clip transformers knows the config, and no language model
@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_a_models_own_code_is_not_run_also_where_somebody_types_yes(mark, tmp_path, monkeypatch, load, own):
    """What the Hub calls remote code: a Python file in the model's folder that its config names. transformers asks on
    standard input whether to run it."""
    model = build_tiny_model(tmp_path / "model")
    (model / "own.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    names = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}
    if own == "clip":
        del names["AutoConfig"]
    for file, change in (
        ("tokenizer_config.json", {"tokenizer_class": "OwnTokenizer"}),
        ("config.json", {"model_type": own}),
    ):
        tree = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps(tree | change | {"auto_map": names}))
    asked = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "y")
    with contextlib.suppress(
        UserError, ValueError, AttributeError
    ):  # it may come without its own code, as a tokenizer of the library
        load(str(model))
    assert not mark.exists() and not asked
