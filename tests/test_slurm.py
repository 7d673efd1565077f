"""The Slurm script: what it would start, and what it does when Slurm wants the node back.

There is no cluster here: srun and scontrol are replaced, and python where it only is to say how it was called.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ranks import PATIENCE_S, wait_for_step
from helpers.sft_world import build_sft_world

from arpo.checkpoint.checkpoints import verify
from arpo.log import read_metrics

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
  for SLURM_NODEID in 0 1; do export SLURM_NODEID SLURMD_NODENAME="node0$((7 + SLURM_NODEID))"; "$@"; done
}
python() { echo "python $* [gloo on ${GLOO_SOCKET_IFNAME:-any}]"; }
export -f scontrol srun python
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
        f"python -m extras.launch --rdzv_conf is_host=1 --local_addr node07 {common}",
        f"python -m extras.launch --rdzv_conf is_host=0 --local_addr node08 {common}",
    ]


def test_redis_interface_restarts_and_script_are_chosen_by_the_environment(tmp_path):
    choices = {"ARPO_REDIS": "1", "ARPO_INTERFACE": "ib0", "ARPO_MAX_RESTARTS": "7", "ARPO_SCRIPT": "evaluate.py"}
    lines = dry_run(tmp_path, "a.yaml", ARPO_REDIS_PASSWORD="secret", **choices)
    assert "srun --overlap --nodes=1 --ntasks=1 --gpus=0 --nodelist=node07" in lines
    [redis] = [line for line in lines if line.startswith("redis-server")]
    assert redis == f"redis-server reads: port 43456;requirepass secret;dir {tmp_path}/runs/redis;appendonly yes;"
    for line in (line for line in lines if line.startswith("python")):
        cache = "extras/redis/cache.py:RedisCache=redis://node07:43456/0"
        assert f"--max_restarts 7 evaluate.py a.yaml --tools.search.cache {cache} [gloo on ib0]" in line
        assert "secret" not in line


# srun as Slurm runs it on one node: a signal that it gets goes to the task. scontrol: it writes down what it should do.
PROGRAMS = {
    "srun": r"""
while [[ $1 == -* ]]; do shift; done
export SLURM_NODEID=0
"$@" & task=$!
trap 'again=1; kill -USR1 $task' USR1
while again=0; wait $task; code=$?; [ $again = 1 ]; do :; done
exit $code
""",
    "scontrol": r"""
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$*" >> asked; fi
""",
}


@pytest.mark.slow
def test_usr1_ends_the_job_with_a_saved_step_and_requeues_it(tmp_path):
    """The script, torchrun and the training are real, srun and scontrol are not."""
    world = build_sft_world(tmp_path, num_steps=1000)
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text("#!/usr/bin/env bash" + text)
        (tmp_path / "bin" / name).chmod(0o755)
    programs = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | JOB | {"SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2", "PATH": programs}
    env |= {"SLURM_SUBMIT_DIR": str(tmp_path), "ARPO_SCRIPT": str(ROOT / "train_sft.py")}
    env |= {"SLURM_JOB_ID": str(os.getpid()), "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    script = subprocess.Popen(["bash", str(SCRIPT), str(world / "config.yaml")], env=env, **pipes)
    run = world / "runs" / "sft"
    wait_for_step(run, 2, lambda: script.poll() is None)
    script.send_signal(signal.SIGUSR1)
    output, _ = script.communicate(timeout=PATIENCE_S)
    assert script.returncode == 0 and "asked to stop by a signal" in output, output[-3000:]
    last = read_metrics(run)[-1]["step"]
    assert 2 <= last < 1000 and verify(run / "checkpoints" / f"step_{last:06d}") is None
    assert (tmp_path / "asked").read_text() == f"requeue {env['SLURM_JOB_ID']}\n"


def test_a_job_that_begins_again_keeps_its_log():
    """Slurm would truncate it, since the job's number stays the same (rwth-i6/sisyphus 201)."""
    options = [line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--requeue", "--open-mode=append", "--output=runs/slurm-%j.log"} <= {*options}


def test_outside_of_slurm_it_says_how_to_start_it():
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(["bash", str(SCRIPT)], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "start this with sbatch" in done.stderr


def test_shellcheck_finds_nothing():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
