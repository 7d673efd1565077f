"""The Slurm script: what it would start. Only srun, scontrol and torchrun are replaced: there is no cluster here."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "slurm_train_rl.sh"
JOB = {
    "SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[07-08]", "SLURM_JOB_NUM_NODES": "2",
    "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "64",
}  # fmt: skip
# srun: a line with its own options, then the command once per node, as Slurm would run it there.
CLUSTER = r"""
scontrol() { [ "$*" = "show hostnames node[07-08]" ] && printf 'node07\nnode08\n'; }
srun() {
  options=()
  while [[ $1 == -* ]]; do options+=("$1"); shift; done
  echo "srun ${options[*]}"
  if [ "$1" = redis-server ]; then echo "redis-server reads: $(cat | tr '\n' ';')"; return; fi
  for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done
}
torchrun() { echo "torchrun $* [gloo on ${GLOO_SOCKET_IFNAME:-any}]"; }
export -f scontrol srun torchrun
"""


def dry_run(folder: Path, *args: str, **environment: str) -> list[str]:
    """The script with `exec` taken out, which would look for programs and not find the functions above."""
    script = folder / "script.sh"
    script.write_text(SCRIPT.read_text().replace("exec ", ""))
    env = os.environ | JOB | {"SLURM_SUBMIT_DIR": str(folder)} | environment
    command = ["bash", "-c", CLUSTER + 'bash "$@"', "bash", str(script), *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_node_gets_one_torchrun_and_the_first_one_hosts_the_meeting(tmp_path):
    common = (
        "--nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint node07:23456 --rdzv_id 123456 "
        "--max_restarts 3 train_rl.py configs/qwen3_8b.yaml configs/aepo.yaml --run.name my run [gloo on any]"
    )
    assert dry_run(tmp_path, "configs/qwen3_8b.yaml", "configs/aepo.yaml", "--run.name", "my run") == [
        "srun --kill-on-bad-exit=1",
        f"torchrun --rdzv_conf is_host=1 {common}",
        f"torchrun --rdzv_conf is_host=0 {common}",
    ]


def test_redis_interface_restarts_and_script_are_chosen_by_the_environment(tmp_path):
    choices = {"ARPO_REDIS": "1", "ARPO_INTERFACE": "ib0", "ARPO_MAX_RESTARTS": "7", "ARPO_SCRIPT": "evaluate.py"}
    lines = dry_run(tmp_path, "a.yaml", ARPO_REDIS_PASSWORD="secret", **choices)
    assert "srun --overlap --nodes=1 --ntasks=1 --gpus=0 --nodelist=node07" in lines
    [redis] = [line for line in lines if line.startswith("redis-server")]
    assert redis == f"redis-server reads: port 43456;requirepass secret;dir {tmp_path}/runs/redis;appendonly yes;"
    for line in (line for line in lines if line.startswith("torchrun")):
        assert "--max_restarts 7 evaluate.py a.yaml --tools.search.cache redis://node07:43456/0 [gloo on ib0]" in line
        assert "secret" not in line


def test_outside_of_slurm_it_says_how_to_start_it():
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(["bash", str(SCRIPT)], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "start this with sbatch" in done.stderr


def test_shellcheck_finds_nothing():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
