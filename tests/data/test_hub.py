"""Data sets of the Hub by name: found before torch is imported, pinned to a commit, read by the scripts' own code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import huggingface_hub.file_download
import pytest
from helpers.hub_server import COMMIT, HubServer
from helpers.models import build_tiny_model

from arpo.data import hub
from arpo.data.hub import HubFile, parse
from arpo.data.model_folder import check_model_folder
from arpo.errors import UserError
from arpo.log.settings import changes, record_settings, save_config
from arpo.model import load_tokenizer
from arpo.sampling.environment import Environment
from arpo.start.load import load_config
from arpo.start.memory import sizes_of
from arpo.start.pins import pin_config, pin_models
from evaluate import EvalConfig
from train_rl import DataConfig, RLConfig
from train_sft import SFTConfig

TRAIN = b'{"question": "1 + 1?", "answer": "2"}\n{"question": "1 + 2?", "answer": "3"}\n'
REPOS = {
    "datasets/o/one": {"README.md": b"# one", "data/questions.jsonl": TRAIN},
    "datasets/o/two": {"main/train.jsonl": TRAIN, "main/test.jsonl": TRAIN},
    "datasets/PeterJinGo/nq_hotpotqa_train": {"train.parquet": b"rows", "test.parquet": b"rows"},
    "datasets/dongguanting/ARPO-RL-DeepSearch-1K": {"gaia_test.jsonl": TRAIN, "hard_search_1k.parquet": b"rows"},
}


@pytest.fixture
def server(tmp_path, monkeypatch):
    with HubServer(dict(REPOS)) as server:
        for name, value in server.environment(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("RANK", raising=False)
        constants = huggingface_hub.constants  # which read the environment when they were imported
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache/hub"))
        yield server


@pytest.mark.parametrize(
    "name, expected",
    [
        ("o/one", HubFile("o/one")),
        ("o/one:data/questions.jsonl", HubFile("o/one", file="data/questions.jsonl")),
        ("o/one@v1.0:a.json", HubFile("o/one", "v1.0", "a.json")),
        ("o/one@refs/pr/1", HubFile("o/one", "refs/pr/1")),
        ("hf://datasets/openai/gsm8k", HubFile("openai/gsm8k")),
        ("https://huggingface.co/datasets/openai/gsm8k/", HubFile("openai/gsm8k")),
        ("https://huggingface.co/datasets/o/one/tree/v1.0", HubFile("o/one", "v1.0")),
        ("https://huggingface.co/datasets/o/one/blob/main/d/a.json", HubFile("o/one", "main", "d/a.json")),
        ("https://huggingface.co/datasets/o/one/resolve/main/a.json?download=true", HubFile("o/one", "main", "a.json")),
        # the Hub's own address of a name with a blank
        ("https://huggingface.co/datasets/o/one/blob/refs/pr/3/a%20b.json", HubFile("o/one", "refs/pr/3", "a b.json")),
        ("hf://datasets/o/one@refs/convert/parquet/f.parquet", HubFile("o/one", "refs/convert/parquet", "f.parquet")),
        ("hf://datasets/o/one@refs%2Fpr%2F3/a%20b.json", HubFile("o/one", "refs/pr/3", "a%20b.json")),
        ("data/train_10k.parquet", None),
        ("data/train.csv", None),
        ("data/train.jsonl.gz", None),
        ("train.jsonl", None),
        ("/data/one", None),
        ("./data/one", None),
        ("../data/one", None),
        ("a/b/c", None),
        ("tests/data", None),  # a folder that is there
        ("", None),
    ],
)
def test_a_name_on_the_hub_is_told_from_a_path(name, expected):
    assert parse(name) == expected


def test_a_name_is_pinned_to_its_commit_and_read_by_the_training_script(server, tmp_path, capsys):
    cfg = pin_config(load_config(RLConfig, ["--data.train", "o/one", "--data.valid", "o/two:main/test.jsonl"]))
    assert cfg.data.train == f"o/one@{COMMIT}:data/questions.jsonl"
    assert cfg.data.valid == f"o/two@{COMMIT}:main/test.jsonl"
    assert f"data.train: o/one@{COMMIT}:data/questions.jsonl (0.0 MB, in {tmp_path}" in capsys.readouterr().out
    server.requests.clear()
    world = SimpleNamespace(codec=Letters(), schemas={})
    prompts = Environment.prompts(world, cfg.data.train, DataConfig(system_prompt="none"))
    assert [prompt.answers for prompt in prompts] == [["2"], ["3"]] and prompts[0].data_source == "one"
    assert pin_config(cfg) == cfg
    assert server.requests == []  # what lies in the cache is not asked for again


class Letters:
    """A codec whose tokens are letters."""

    tools = ("python", "search")
    format = "tags"

    def render_prompt(self, messages):
        return [ord(letter) for message in messages for letter in message["content"]]


def test_all_options_that_take_files_take_names(server):
    sft = pin_config(load_config(SFTConfig, ["--data.train", "o/one", "--data.valid", "data/valid.jsonl"]))
    assert (sft.data.train, sft.data.valid) == (f"o/one@{COMMIT}:data/questions.jsonl", "data/valid.jsonl")
    evaluation = pin_config(load_config(EvalConfig, ["--eval.files", "mine.jsonl", "o/two@main:main/test.jsonl"]))
    assert evaluation.eval.files == ("mine.jsonl", f"o/two@{COMMIT}:main/test.jsonl")


def test_a_run_goes_on_with_the_commit_that_it_was_begun_with(server, tmp_path):
    flags = ["--run.dir", str(tmp_path), "--run.name", "r", "--data.train"]
    before = pin_config(load_config(RLConfig, [*flags, "o/one"]))
    (tmp_path / "r").mkdir()
    record_settings(tmp_path / "r", before, step=0)
    server.commit = COMMIT[::-1]  # the data set has changed
    newest = f"o/one@{COMMIT[::-1]}:data/questions.jsonl"
    server.requests.clear()
    assert pin_config(load_config(RLConfig, [*flags, "o/one"])) == before
    assert server.requests == []

    now = pin_config(load_config(RLConfig, [*flags, "o/one@main"]))
    assert changes(tmp_path / "r", now) == {"data.train": (before.data.train, newest)}  # which the run refuses
    record_settings(tmp_path / "r", now, step=3)  # or goes on with, under run.resume_changed
    assert pin_config(load_config(RLConfig, [*flags, "o/one"])).data.train == newest
    assert pin_config(load_config(RLConfig, ["--data.train", "o/one"])).data.train == newest  # another run


def test_an_evaluation_goes_on_with_the_commits_of_its_files_also_after_one_is_added(server, tmp_path):
    flags = ["--run.dir", str(tmp_path), "--run.name", "e", "--eval.files"]
    before = pin_config(load_config(EvalConfig, [*flags, "mine.jsonl", "o/one"]))
    (tmp_path / "e").mkdir()
    save_config(before, tmp_path / "e" / "config.yaml")
    server.commit = COMMIT[::-1]
    files = ("o/two:main/test.jsonl", "o/one", "mine.jsonl")
    assert pin_config(load_config(EvalConfig, [*flags, *files])).eval.files == (
        f"o/two@{COMMIT[::-1]}:main/test.jsonl", before.eval.files[1], "mine.jsonl",
    )  # fmt: skip


def test_of_the_papers_data_sets_the_file_to_train_on_is_known(server):
    name = "dongguanting/ARPO-RL-DeepSearch-1K"
    assert hub.pin("data.train", name) == f"{name}@{COMMIT}:hard_search_1k.parquet"
    assert hub.pin("data.valid", f"{name}:gaia_test.jsonl") == f"{name}@{COMMIT}:gaia_test.jsonl"
    search_r1 = "PeterJinGo/nq_hotpotqa_train"
    assert hub.pin("data.train", search_r1) == f"{search_r1}@{COMMIT}:train.parquet"


def test_what_cannot_be_had_is_one_line_that_begins_with_the_option(server, tmp_path, monkeypatch):
    server.gated.add("datasets/o/two")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    said = {}
    for name in ("o/two", "o/one:train.jsonl", "o/two:main/test.jsonl", "o/none", "data/rows"):
        with pytest.raises(UserError) as caught:
            hub.pin("data.train", name)
        said[name] = str(caught.value).removeprefix(f"data.train={name}: ")
    assert said == {
        "o/two": "2 files fit; choose one: o/two:FILE; the data set has main/train.jsonl, main/test.jsonl",
        "o/one:train.jsonl": f"no such file; choose one of {server.url}/datasets/o/one/tree/main",
        "o/two:main/test.jsonl": f"behind a form; accept it at {server.url}/datasets/o/two, then set HF_TOKEN",
        "o/none": f"no such file here, and {server.url}/datasets/o/none does not exist or is private; correct "
        "the name, or set HF_TOKEN",
        "data/rows": "no such file here; for a data set of the Hub with the same name, write OWNER/NAME:FILE",
    }


@pytest.mark.parametrize(
    "commit, etag",
    [
        ("../" * 9 + "tmp", ""),
        (COMMIT[:39], ""),
        (COMMIT, "../../../../outside"),
        (COMMIT, "/outside"),
        (COMMIT, "abc"),
    ],
)
def test_a_mirror_that_points_out_of_the_cache_writes_nothing(server, tmp_path, commit, etag):
    server.commit, server.etag = commit, etag
    with pytest.raises(UserError, match=r"^data\.train=o/one: not the Hub's answer: commit .*; check the name, HF_END"):
        hub.pin("data.train", "o/one")
    server.repos["models/o/model"] = {"config.json": b"{}"}
    with pytest.raises(UserError, match=r"^model\.path=o/model: not the Hub's answer: commit "):
        hub.model_folder("o/model")
    with pytest.raises(ValueError, match="not the Hub's answer: commit "):  # as transformers would ask
        huggingface_hub.hf_hub_download("o/model", "config.json")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()] and server.downloads() == []


@pytest.mark.parametrize("file", ["../../../../../outside.jsonl", "/outside.jsonl", "a\0b.jsonl"])
def test_a_name_of_a_mirror_that_is_none_writes_nothing_and_is_one_line(server, tmp_path, file):
    server.repos["datasets/o/odd"] = {file: TRAIN}
    with pytest.raises(UserError, match=r"^data\.train=o/odd: .*") as error:
        hub.pin("data.train", "o/odd")
    assert "\n" not in str(error.value) and not list(tmp_path.rglob("*outside*"))


def test_what_goes_wrong_besides_is_one_line(server):
    with pytest.raises(UserError, match=r"^data\.train=o--b/one: .*; check the name, HF_ENDPOINT and the disk's space"):
        hub.pin("data.train", "o--b/one")
    line = r"^x: .*No space left on device; .* and the disk's space"
    with pytest.raises(UserError, match=line), hub._errors_of_hub("x", "o/one"), open("/dev/full", "wb") as full:
        full.write(b"x")


def test_without_a_network_the_cache_has_what_was_fetched(server, monkeypatch):
    pinned = hub.pin("data.train", "o/one")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(UserError, match="cannot be reached"), hub._errors_of_hub("x", "o/one"):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no answer")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # as under TRANSFORMERS_OFFLINE=1 too
    monkeypatch.delenv("HF_HUB_OFFLINE")
    server.requests.clear()
    assert hub.pin("data.train", "o/one") == pinned
    assert hub.local_file(pinned).read_bytes() == TRAIN
    with pytest.raises(UserError, match=r"^data\.train=o/two: not here, and it is not in the Hub's cache, and HF_HUB"):
        hub.pin("data.train", "o/two")
    assert server.requests == []


MODEL = {"config.json": b"{}", "tokenizer.json": b"{}", "original/consolidated.00.pth": b"x", "README.md": b"# m"}
SHARDS = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
PARTS = {"model-1.safetensors": b"1", "model-2.safetensors": b"2"}
WEIGHTS = {  # report: (weights of the repository, those that are fetched)
    "one file, and the same in Mistral's format": ({"consolidated.safetensors": b"x"}, ["model.safetensors"]),
    "two models (unsloth#2978)": ({"model_old.safetensors": b"x"}, ["model.safetensors"]),
    "an adapter beside its base (unsloth#1061)": ({"adapter_model.safetensors": b"x"}, ["model.safetensors"]),
    "a folder of other formats": ({"onnx/model.safetensors": b"x", "flax_model.msgpack": b""}, ["model.safetensors"]),
    "shards with their index": ({"model.safetensors.index.json": SHARDS} | PARTS, sorted(PARTS)),
    "one of another name": ({"pytorch_model.safetensors": b"x"}, ["pytorch_model.safetensors"]),
}


@pytest.mark.parametrize("report", WEIGHTS)
def test_a_model_of_the_hub_is_fetched_once_and_without_what_is_not_its_own(server, report):
    files, wanted = WEIGHTS[report]
    alone = {} if "index" in " ".join(files) or wanted != ["model.safetensors"] else {"model.safetensors": b"w"}
    server.repos["models/o/model"] = MODEL | files | alone
    folder = hub.model_folder("o/model")
    there = {str(file.relative_to(folder)) for file in folder.rglob("*")}
    small = {"model.safetensors.index.json"} & files.keys()
    assert there == {"config.json", "tokenizer.json", "README.md", *wanted, *small}
    assert hub.hub_name(str(folder)) == f"o/model@{COMMIT}" and folder.name == COMMIT
    assert hub.model_folder(str(folder)) == folder


def test_a_run_goes_on_with_the_commit_of_its_model_and_asks_nothing_without_a_network(server, tmp_path, monkeypatch):
    """huggingface_hub#4487, av/harbor#262: minutes of retries for files that no cache has."""
    model = build_tiny_model(tmp_path / "model")
    server.repos["models/o/model"] = {file.name: file.read_bytes() for file in model.iterdir()}
    cfg = load_config(SFTConfig, ["--data.train", "x", "--model.path", "o/model", "--run.dir", str(tmp_path)])
    pinned = pin_models(cfg)
    folder = Path(pinned.model.path)
    assert folder.name == COMMIT and check_model_folder(pinned.model.path) is None
    pinned.run.folder.mkdir()
    record_settings(pinned.run.folder, pinned, step=0)
    server.commit = "f" * 40
    assert pin_models(cfg) == pinned, "another commit is on the Hub, and the run has its own"
    changed = replace(cfg, model=replace(cfg.model, path="o/model@main"))
    assert pin_models(changed).model.path == str(folder.with_name("f" * 40))
    server.requests.clear()
    for offline in (True, False):  # by the variable, and by a Hub that does not answer
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        assert pin_models(cfg) == pinned
    assert load_tokenizer(pinned.model.path) and sizes_of(pinned.model.path) and server.requests == []


def test_what_a_model_of_the_hub_lacks_is_one_line_before_torch(server, tmp_path):
    server.repos["models/o/none"] = {"README.md": b"# gguf"}
    server.repos["models/o/short"] = {"config.json": b'{"max_position_embeddings": 64}', "model.safetensors": b""}
    server.repos["models/o/short"] |= {"tokenizer_config.json": b'{"chat_template": "x"}'}
    common = ["--data.train", "x", "--run.dir", str(tmp_path), "--model.path"]
    for name, words in {"o/none": "no config.json there", "o/short": "max_position_embeddings = 64"}.items():
        with pytest.raises(UserError, match=f"^model.path=.*{words}"):
            pin_models(load_config(RLConfig, [*common, name]))
