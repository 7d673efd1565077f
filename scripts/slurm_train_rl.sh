#!/usr/bin/env bash
# RL on several nodes of 8 GPUs under Slurm. Fit the #SBATCH lines to your cluster; all arguments go to train_rl.py:
#
#   mkdir -p runs
#   ARPO_REDIS=1 sbatch --nodes 4 scripts/slurm_train_rl.sh configs/qwen2.5_7b.yaml configs/arpo.yaml \
#     --model.path /shared/sft/hf --run.dir /shared/runs --tools.search.zone ZONE
#
# On a disk that all nodes see: this folder with its .venv, the model, the data, and run.dir (checkpoints).
#
# Environment, all optional:
#   ARPO_INTERFACE=ib0      network interface between the nodes, where gloo or NCCL choose a wrong one (see `ip -br addr`)
#   ARPO_REDIS=1            a Redis server on the first node for the life of the job: one search cache for all nodes;
#                           it is kept in runs/redis and read again by the next job
#   ARPO_MAX_RESTARTS=3     how often the ranks are started again after a failure, from the newest checkpoint
#   ARPO_SCRIPT=train_sft.py   another script with the same launch line
#
# A job that ends with code 75 found a service down (search, judge): put it into the queue again later. After code 2
# mend the settings first.
# Ten minutes before the time limit (--signal below; more, if a step takes longer) the ranks end their step, save it and
# leave; the job is then put into the queue again, and goes on from there (not under sbatch --no-requeue).

#SBATCH --job-name=arpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --output=runs/slurm-%j.log

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
# shellcheck source=/dev/null
[ ! -e .venv/bin/activate ] || source .venv/bin/activate

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export script=${ARPO_SCRIPT:-train_rl.py} OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun no longer takes it from the job
if [ -n "${ARPO_INTERFACE:-}" ]; then
  export GLOO_SOCKET_IFNAME=$ARPO_INTERFACE NCCL_SOCKET_IFNAME=$ARPO_INTERFACE
fi

cache=()
if [ "${ARPO_REDIS:-0}" = 1 ]; then
  mkdir -p runs/redis
  redis_port=$((40000 + SLURM_JOB_ID % 20000))
  ARPO_REDIS_PASSWORD=${ARPO_REDIS_PASSWORD:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
  export ARPO_REDIS_PASSWORD # the cache reads it there; on a command line everybody could
  # --overlap: beside the training step, on the same CPUs. appendonly: what is cached survives the job.
  printf '%s\n' "port $redis_port" "requirepass $ARPO_REDIS_PASSWORD" "dir $PWD/runs/redis" "appendonly yes" |
    srun --overlap --nodes=1 --ntasks=1 --gpus=0 --nodelist="$first_node" redis-server - &
  cache=(--tools.search.cache "extras/redis/cache.py:RedisCache=redis://$first_node:$redis_port/0")
fi

# Wait for a process to its end, and return its code. `wait` alone also returns when a trap has run.
await() {
  local code
  while true; do
    signalled=0 code=0
    wait "$1" || code=$?
    [ "$signalled" = 1 ] || return "$code"
  done
}

# One torchrun per node (extras.launch: with the exit code of the rank that failed). The first one keeps the store at which all meet: it is told so, because torchrun would find out
# by comparing host names, which fails where the node's own name differs from Slurm's. Slurm's name is also the address
# that the ranks get: in a container the node's own one may mean nothing to the others.
# The wish to stop goes past torchrun, which would kill its ranks 30 s later and then fail; it is sent again until no rank
# is left, because one that is still loading does not hear it. TERM is what Slurm sends for a preemption.
node() {
  (trap '' USR1 && exec python -m extras.launch --rdzv_conf "is_host=$((SLURM_NODEID == 0))" \
    ${SLURMD_NODENAME:+--local_addr "$SLURMD_NODENAME"} "$@") &
  agent=$!
  trap 'signalled=1; while pkill -USR1 -P "$agent" -f "$script"; do sleep 5; done' USR1 TERM
  await "$agent"
}

# A node whose torchrun gives up ends the job step on all nodes.
srun --kill-on-bad-exit=1 bash -c "$(declare -f await node); node \"\$@\"" node \
  --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-gpu}" \
  --rdzv_backend c10d --rdzv_endpoint "$first_node:$((20000 + SLURM_JOB_ID % 20000))" --rdzv_id "$SLURM_JOB_ID" \
  --max_restarts "${ARPO_MAX_RESTARTS:-3}" \
  "$script" "$@" ${cache[@]+"${cache[@]}"} &
step=$!
asked=0
trap 'signalled=1 asked=1; kill -USR1 "$step"' USR1 # srun hands it to each node's task
await "$step"
if [ "$asked" = 1 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
