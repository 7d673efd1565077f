"""The GPU kit on a host without internet: what is carried can be imported there, and each call fits its minutes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.edits import ROOT

from benchmarks import gpu_report
from benchmarks.gpu import offline
from benchmarks.shared.gpu_sections import sections

START_MIN, TRANSFER_MIN, UNPACK_S = 1.5, 0.8, 30
"""Of a host's start, of each call's transfers there and back, and of unpacking vLLM (estimates)."""


def sections_of(call: offline.Call) -> list:
    """Return the sections that run on a host with one GPU."""
    chosen = [s for s in sections("cuda") if any(part in s.name for part in call.only) and s.num_gpus == 1]
    return [section for section in chosen if call.with_vllm or "vllm" not in section.needs]


def test_the_sections_of_a_call_exist_and_fit_its_minutes():
    names = [section.name for section in sections("cuda")]
    for key, call in offline.CALLS.items():
        assert call.minutes <= 9.5, "a command may take ten minutes"
        assert all(any(part in name for name in names) for part in call.only), key
        unpack_s = UNPACK_S * (key in ("2", "2-short"))
        assert 60 < sum(section.expected_s for section in sections_of(call)) + unpack_s <= 60 * call.minutes, key


@pytest.mark.parametrize("minutes", offline.PLANS)
def test_the_calls_of_a_plan_fit_its_minutes_and_the_first_needs_no_vllm(minutes):
    calls = [offline.CALLS[name] for name in offline.PLANS[minutes]]
    assert START_MIN + sum(call.minutes + TRANSFER_MIN for call in calls) <= minutes
    assert [call.with_vllm for call in calls] == [False] + [True] * (len(calls) - 1)
    assert not any("vllm" in section.needs for section in sections_of(calls[0]))
    ran = {section.name for call in calls for section in sections_of(call)}
    left = {section.name for section in sections("cuda") if section.num_gpus == 1} - ran
    assert (left == {"speed/engine_decode_noise_loop"}) == (minutes == max(offline.PLANS))  # the longest runs the rest


def test_the_docs_have_the_calls_with_their_minutes():
    page = (ROOT / "benchmarks/gpu/README.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+(?:\.\d)?) \|", page, re.MULTILINE)
    assert {name: float(minutes) for name, minutes in rows} == {n: c.minutes for n, c in offline.CALLS.items()}
    for minutes, names in offline.PLANS.items():
        assert f"\n| {minutes} | {', '.join(f'`{name}`' for name in names)} |" in page, minutes


@pytest.fixture
def carried(tmp_path, monkeypatch):
    """A repository with both carries and a kit that fails if it cannot import what was carried."""
    tree = tmp_path / "tree"
    for name, folder in {"a_of_ours": "ours", "a_of_vllm": "vllm"}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_bytes(b"# " + os.urandom(4000).hex().encode())
    for number in (1, 2):
        (tree / f"carry_{number}").mkdir(parents=True)
    offline.pack(tmp_path / "ours", tree / "carry_1" / "ours.tar.xz")
    size = offline.pack(tmp_path / "vllm", tmp_path / "vllm.tar.xz")
    offline.split(tmp_path / "vllm.tar.xz", [(tree / "carry_1", size - 500), (tree / "carry_2", 1000)])
    monkeypatch.setattr(offline, "ROOT", tree)
    (tree / "benchmarks").mkdir()
    return tree


def write_kit(tree: Path, *lines: str) -> None:
    start = ["import sys, time; from pathlib import Path", "out = Path(sys.argv[sys.argv.index('--out') + 1])"]
    start += ["out.mkdir(parents=True, exist_ok=True)"]
    (tree / "benchmarks" / "gpu_report.py").write_text("\n".join([*start, *lines]))


def test_vllm_is_unpacked_once_both_parts_are_there_and_stays_for_later_calls(carried, tmp_path):
    keep, second = tmp_path / "keep", carried / "carry_2"
    second.rename(tmp_path / "later")
    site = offline.unpack(carried, keep)
    assert sorted(path.name for path in site.iterdir()) == ["a_of_ours.py"]
    (carried / "carry_1").rename(tmp_path / "gone")
    (tmp_path / "later").rename(second)
    offline.unpack(carried, keep)
    assert sorted(path.name for path in site.iterdir()) == ["a_of_ours.py", "a_of_vllm.py"]
    (site / "a_of_vllm.py").unlink()
    offline.unpack(carried, keep)
    assert not (site / "a_of_vllm.py").exists(), "it is not unpacked again"


def test_a_call_that_is_cut_off_leaves_its_report_here_and_for_the_next_call(carried, tmp_path):
    write_kit(carried, "import a_of_ours, a_of_vllm", "(out / 'first').write_text('1')", "time.sleep(600)")
    cut = offline.Call(minutes=-25 / 60, only=("a",))  # a limit of 5 s
    assert offline.run_call(cut, tmp_path / "out", tmp_path / "keep", []) == 124
    assert (tmp_path / "out" / "report" / "first").read_text() == "1"
    write_kit(carried, "assert (out / 'first').exists() and '--resume' in sys.argv", "sys.exit(7)")
    assert offline.run_call(offline.Call(1.0, ("a",)), tmp_path / "out2", tmp_path / "keep", []) == 7


def test_an_archive_that_does_not_fit_is_an_error(tmp_path):
    (tmp_path / "a.tar.xz").write_bytes(b"0" * 2_000_000)
    with pytest.raises(SystemExit, match=r"a\.tar\.xz has 2 MB, and the carries have room for 1"):
        offline.split(tmp_path / "a.tar.xz", [(tmp_path, 500_000), (tmp_path, 500_000)])


def test_a_resumed_report_leaves_out_what_has_passed(tmp_path, monkeypatch):
    """As datafusion-ballista 2101: a run that was cut off must not begin again."""
    code = f"from pathlib import Path; Path({str(tmp_path)!r}, 'NAME').write_text(''); print('{{}}')"
    chosen = [gpu_report.Section(name, ("-S", "-c", code.replace("NAME", name))) for name in ("done", "failed", "new")]
    outcomes = [gpu_report.Outcome("done", "passed", 1.0, result={"ratio": 2.0})]
    outcomes.append(gpu_report.Outcome("failed", "failed", 1.0))
    gpu_report.write_report(tmp_path / "report", {}, outcomes)
    monkeypatch.setattr(gpu_report, "sections", lambda device: chosen)
    monkeypatch.setattr(gpu_report, "machine", lambda device: {"gpu": "none", "gpus": "0"})
    monkeypatch.setattr(gpu_report, "write_machine", lambda file, gpu: None)
    monkeypatch.setattr(sys, "argv", ["kit", "--device", "cpu", "--resume", "--out", str(tmp_path / "report")])
    with pytest.raises(SystemExit) as end:
        gpu_report.main()
    assert not end.value.code
    ran = json.loads((tmp_path / "report" / "report.json").read_text())["sections"]
    assert [(section["name"], section["status"]) for section in ran] == [(s.name, "passed") for s in chosen]
    assert ran[0]["result"] == {"ratio": 2.0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failed", "new", "report"]


ON_THE_HOST = """
absl-py accelerate aiohappyeyeballs aiohttp aiosignal annotated-doc anyio attrs certifi charset-normalizer click
cloudpickle einops filelock frozenlist fsspec grpcio h11 hf-xet httpcore httpx huggingface-hub hypothesis idna
iniconfig it-py jinja2 joblib llvmlite markdown- markupsafe mdurl mpmath multidict networkx ninja numba numpy
nvidia-ml-py opencv-python-headless packaging pandas pillow pluggy prometheus-client propcache protobuf psutil
py-cpuinfo pyarrow pygments pytest python-dateutil pyyaml regex requests rich safetensors scipy sentencepiece
setuptools shellingham six sympy tabulate tensorboard tiktoken tokenizers torch torchaudio torchvision tqdm
transformers triton typer typing-extensions urllib3 uvloop werkzeug wrapt xxhash yarl zipp
"""
"""Packages of an image with torch and transformers, as far as vLLM imports them."""

DEEP = """
v1.worker.gpu_worker v1.worker.gpu_model_runner v1.attention.backends.flash_attn v1.attention.backends.triton_attn
compilation.backends compilation.wrapper compilation.decorators compilation.cuda_graph compilation.compiler_interface
compilation.caching model_executor.models.qwen2 model_executor.models.qwen3 model_executor.models.llama
device_allocator.cumem v1.engine.core v1.engine.llm_engine model_executor.warmup.kernel_warmup v1.core.sched.scheduler
v1.core.sched.async_scheduler v1.executor.uniproc_executor model_executor.model_loader
model_executor.model_loader.dummy_loader model_executor.model_loader.default_loader v1.sample.sampler
v1.sample.ops.topk_topp_sampler v1.spec_decode.eagle multimodal.hasher
distributed.device_communicators.cuda_communicator distributed.device_communicators.all_reduce_utils entrypoints.llm
v1.metrics.loggers tokenizers v1.structured_output utils.deep_gemm utils.flashinfer
model_executor.layers.quantization.online.fp8 model_executor.layers.fused_moe renderers v1.worker.utils
v1.worker.ubatching v1.worker.gpu.model_runner v1.worker.gpu.sample.sampler
"""
"""Modules of vLLM that the start of an engine imports, many of them inside functions."""

IMPORT_THEM = '''
import importlib, importlib.abc, importlib.machinery, importlib.metadata, pathlib, sys
site, here = sys.argv[1], set(sys.argv[2].split())

class HostOnly(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, but no package of ours that the host lacks."""

    find_distributions = staticmethod(importlib.machinery.PathFinder.find_distributions)

    def __init__(self, finders):
        self.finders = finders

    def find_spec(self, name, path=None, target=None):
        owners = {owner.lower().replace("_", "-") for owner in OWNERS.get(name, ())}
        if owners and not owners & here:
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in found if spec), None)

carried = [entry for entry in sys.path if entry.startswith(site)]
rest = [entry for entry in sys.path if not entry.startswith(site)]
sys.path[:] = rest
OWNERS = importlib.metadata.packages_distributions()
OWNERS.pop("arpo", None)
sys.path[:] = carried + rest
for path in pathlib.Path(site).glob("*/*"):
    OWNERS.pop(path.stem.partition(".")[0], None)  # carried, and so first in the path
sys.meta_path[:] = [HostOnly([*sys.meta_path])]
import tyro, tantivy, math_verify, latex2sympy2_extended
from fake_gpu.vllm_sources import pretend_h100
from arpo.engine.containment import prepare_for_vllm
prepare_for_vllm()
pretend_h100()
for module in sys.argv[3].split():
    importlib.import_module("vllm." + module)
import vllm, pydantic_core
assert vllm.__file__.startswith(site) and pydantic_core.__file__.startswith(site)
print("all imported")
'''


@pytest.mark.slow
@pytest.mark.download
def test_what_is_carried_is_all_that_an_engine_imports_beside_the_hosts_packages(tmp_path):
    """As vllm 24755: a list of wheels by hand lacks one, and that is seen on the host without internet."""
    try:
        offline.gather(tmp_path, ".".join(map(str, sys.version_info[:2])))
    except subprocess.CalledProcessError:
        pytest.skip("the packages cannot be downloaded")
    paths = [tmp_path / "ours", tmp_path / "vllm", ROOT / "tests", ROOT]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", IMPORT_THEM, str(tmp_path), ON_THE_HOST, DEEP]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0 and "all imported" in done.stdout, done.stderr[-3000:]
