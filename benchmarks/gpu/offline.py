"""The GPU kit on a host without internet and with few minutes: what to carry there, and one command for each call.

    python benchmarks/gpu/offline.py prepare              at home: carry_1/ and carry_2/, each at most 60 MB
    python benchmarks/gpu/offline.py call 1 --out DIR     on the host, in a copy of the repository; bring DIR home

The host has Python 3.12, torch 2.11 for CUDA 13 and transformers 5.17. vLLM 0.22.1 was built for this torch. `prepare`
gathers vLLM and the packages that such a host lacks, without their own dependencies. It leaves out kernels for other
GPUs and models. Instead of xgrammar, which is large and which we do not use, it writes a stub of four lines.

A call is one command of at most ten minutes. It unpacks what has been carried so far, and runs sections of
benchmarks/gpu_report.py. The report in DIR is rewritten after each section. What is unpacked and what is measured stays
in --keep for the next call. A call that was cut off can be repeated: sections that have passed do not run again.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CARRY_BYTES = 60_000_000
"""Largest size of a carry."""

OURS = (
    "tyro==1.0.17", "typeguard==4.6.1", "docstring_parser==0.18.0", "math-verify==0.9.0",
    "latex2sympy2_extended==1.11.0", "antlr4-python3-runtime==4.13.2", "tantivy==0.27.0",
)  # fmt: skip
"""Packages that our code imports."""

VLLM = "vllm==0.22.1"
OF_VLLM = (
    "annotated-types==0.7.0", "cachetools==8.0.2", "cbor2==6.3.0", "fastapi==0.165.0", "starlette==1.10.0",
    "httpx2==2.16.2", "httpcore2==2.16.2", "truststore==0.10.5", "llguidance==1.7.6", "msgspec==0.22.0",
    "openai==3.57.0", "jiter==0.19.0", "distro==1.9.0", "sniffio==1.3.1", "openai-harmony==0.0.8",
    "opentelemetry-api==1.45.2", "partial-json-parser==0.2.1.1.post7", "pybase64==1.5.1", "pydantic==2.14.4",
    "pydantic-core==2.50.5", "typing-inspection", "python-multipart==0.0.34", "pyzmq==27.3.0",
    "compressed-tensors==0.15.0.1", "loguru==0.7.3",
)  # fmt: skip
"""Packages that vLLM imports when an engine starts. The last two are for FP8."""

LEFT_OUT = (
    "vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/_moe_C*", "vllm/_flashmla*", "vllm/third_party/deep_gemm/*",
    "vllm/vllm-rs*",
)  # fmt: skip
"""Files of vLLM for other GPUs (an H100 uses FlashAttention 3), for mixtures of experts, and for its server."""

STUB = '''"""Stands in for xgrammar (46 MB), whose grammars nothing here asks for: any name is a class."""
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return type(name, (), {})
'''


@dataclass(frozen=True)
class Call:
    minutes: float
    """Time limit of unpacking and of all its sections; the command may take another half minute."""
    only: tuple[str, ...]
    """Parts of the names of its sections."""
    with_vllm: bool = True
    """False for the first call, which begins before all of vLLM has been carried."""


FIRST = ("correctness/", "update_mfu_1.5b", "attention_backends", "tree_training", "speed/update_mfu_7b")
SECOND = ("vllm_samples_from", "vllm_has_the", "run/train_rl_small", "decode_steps_0.5b")
CALLS = {
    "1-short": Call(5.0, FIRST, with_vllm=False),
    "2-short": Call(5.5, SECOND),
    "1": Call(8.0, (*FIRST, "update_mfu_0.5b", "optimizer_step", "mfu_0.6b_16k", "head_memory"), with_vllm=False),
    "2": Call(9.5, (*SECOND, "engine_decode_usual", "decode_steps_7b")),
    "3": Call(8.5, ("speed/colocated", "run/train_rl_0.5b", "fifty_cycles", "decode_steps_v2")),
    "4": Call(8.0, ("correctness/vllm", "weight_sync", "rollout_streaming")),
    "5": Call(5.0, ("engine_decode_v2", "engine_decode_fp8", "engine_decode_eager", "engine_decode_synchronous")),
}
PLANS = {15: ("1-short", "2-short"), 30: ("1", "2", "3"), 45: ("1", "2", "3", "4", "5")}
"""Minutes on the host -> calls, the most valuable first. The rest is the host's start and the transfers."""


# ------------------------------------------------------------------------------------------------------------ at home


def download(packages: tuple[str, ...], folder: Path, python: str) -> None:
    """Download the wheels for Linux, without dependencies, and unzip all wheels into the folder."""
    names = ["any", "manylinux1_x86_64", "manylinux2014_x86_64", *(f"manylinux_2_{n}_x86_64" for n in range(5, 40))]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform={name}" for name in names]
    with tempfile.TemporaryDirectory() as wheels:
        subprocess.run([*command, "--dest", wheels, *packages], check=True)
        for wheel in sorted(Path(wheels).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                files = archive.namelist()
                archive.extractall(folder, [f for f in files if not any(fnmatch.fnmatch(f, p) for p in LEFT_OUT)])


def gather(folder: Path, python: str) -> None:
    """Write folder/ours and folder/vllm, as they will be unpacked on the host."""
    download(OURS, folder / "ours", python)
    download((VLLM, *OF_VLLM), folder / "vllm", python)
    (folder / "vllm" / "xgrammar").mkdir()
    (folder / "vllm" / "xgrammar" / "__init__.py").write_text(STUB)


def pack(folder: Path, archive: Path) -> int:
    """Write a tar.xz, which is a third smaller than wheels. Return its size."""
    with tarfile.open(archive, "w:xz", preset=3) as tar:
        tar.add(folder, arcname=".")
    return archive.stat().st_size


def split(archive: Path, places: list[tuple[Path, int]]) -> None:
    """Cut an archive into PLACE/NAME.1of2, PLACE/NAME.2of2, each at most as large as its place has room."""
    size = archive.stat().st_size
    room = sum(num_bytes for _, num_bytes in places)
    if size > room:
        sys.exit(f"error: {archive.name} has {size / 1e6:.0f} MB, and the carries have room for {room / 1e6:.0f}")
    with archive.open("rb") as source:
        for number, (place, num_bytes) in enumerate(places, 1):
            (place / f"{archive.name}.{number}of{len(places)}").write_bytes(source.read(num_bytes))


def prepare(target: Path, python: str) -> None:
    """Write target/carry_1 and target/carry_2."""
    carries = [target / "carry_1", target / "carry_2"]
    for carry in carries:
        shutil.rmtree(carry, ignore_errors=True)
        carry.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gather(folder, python)
        taken = pack(folder / "ours", carries[0] / "ours.tar.xz")
        pack(folder / "vllm", folder / "vllm.tar.xz")
        split(folder / "vllm.tar.xz", [(carries[0], CARRY_BYTES - taken), (carries[1], CARRY_BYTES)])
    for carry in carries:
        print(f"{carry}: {sum(file.stat().st_size for file in carry.iterdir()) / 1e6:.0f} MB")


# -------------------------------------------------------------------------------------------------------- on the host


def unpack(tree: Path, keep: Path) -> Path:
    """Copy what has been carried into `keep`, and unpack each archive that is complete, once. Return the packages."""
    site = keep / "site"
    site.mkdir(parents=True, exist_ok=True)
    for file in sorted(tree.glob("carry_*/*")):
        shutil.copy(file, keep)
    for name in ("ours.tar.xz", "vllm.tar.xz"):
        parts = sorted(keep.glob(f"{name}*of*")) or sorted(keep.glob(name))
        num_parts = int(parts[0].name.rpartition("of")[2]) if parts and "of" in parts[0].suffix else 1
        done = keep / f"{name}.done"
        if done.exists() or len(parts) < num_parts or not parts:
            continue
        whole = keep / f"{name}.whole"
        with whole.open("wb") as output:
            for part in parts:
                output.write(part.read_bytes())
        with tarfile.open(whole) as tar:
            tar.extractall(site, filter="data")
        whole.unlink()
        done.touch()
    return site


def run_call(call: Call, out: Path, keep: Path, extra: list[str]) -> int:
    """Run the sections of a call. Return the kit's exit code, or 124 if the call was cut off."""
    started = time.monotonic()
    site = unpack(ROOT, keep)
    unpack_s = time.monotonic() - started
    report = out / "report"
    if (keep / "report").exists():
        shutil.copytree(keep / "report", report, dirs_exist_ok=True)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    kit = [sys.executable, str(ROOT / "benchmarks" / "gpu_report.py"), "--out", str(report), "--resume"]
    kit += ["--total-min", str(call.minutes - unpack_s / 60), "--only", *call.only, *extra]
    try:
        return subprocess.run(kit, cwd=ROOT, env=environment, timeout=60 * call.minutes + 30 - unpack_s).returncode
    except subprocess.TimeoutExpired:
        return 124
    finally:
        if report.exists():
            shutil.copytree(report, keep / "report", dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    at_home = commands.add_parser("prepare", help="gather the packages, at home")
    at_home.add_argument("--target", type=Path, default=ROOT, help="folder of carry_1 and carry_2")
    at_home.add_argument("--python", default="3.12", help="the host's Python")
    on_host = commands.add_parser("call", help="run the sections of a call, on the host")
    on_host.add_argument("name", choices=CALLS)
    on_host.add_argument("--out", type=Path, required=True, help="folder that comes home")
    on_host.add_argument("--keep", type=Path, default=Path.home() / ".cache" / "arpo-offline")
    args, extra = parser.parse_known_args()
    if args.command == "prepare":
        prepare(args.target, args.python)
    else:
        sys.exit(run_call(CALLS[args.name], args.out, args.keep, extra))


if __name__ == "__main__":
    main()
