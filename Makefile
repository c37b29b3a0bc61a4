# Everything a newcomer needs: `make demo` and `make test` each set up what they use.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-min
BIN := $(VENV)/bin
# Without warnings: an editable install finds it noteworthy that a checkout has a folder of the package's name.
INSTALL := PYTHONWARNINGS=ignore $(BIN)/pip install -q
ROUNDS ?= 50
export HF_HUB_DISABLE_TELEMETRY = 1

# Arithmetic differs between processors, so these tests also run with the instructions of older ones.
NUMERICAL := tests/losses tests/models/test_packing.py tests/models/test_attention.py \
    tests/parity/test_parity.py tests/parity/test_families_parity.py

.PHONY: demo test wheel test-processors test-floors lint docs bench-quick bench-gpu chaos train-free-fsdp train-baseline-fsdp clean

demo: $(VENV)/.demo                       ## train the embedded model on the embedded data, offline
	HF_HUB_OFFLINE=1 $(BIN)/vembed demo

test: $(VENV)/.dev                        ## lint, types and all tests
	$(MAKE) --no-print-directory lint
	# Arithmetic fails twice; only processes that a busy machine held up may pass the second time, counted as "rerun".
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist loadfile --reruns 1

test-processors: $(VENV)/.dev             ## numerical tests as on processors without AVX-512 and without AVX
	failed=0; \
	for set in "ATEN_CPU_CAPABILITY=default" "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2"; do \
	    env $$set HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist loadfile -k "not ddp and not fsdp" $(NUMERICAL) \
	        || failed=1; \
	done; exit $$failed

test-floors: $(OLDEST)/.installed         ## a short training with the oldest dependencies that are allowed
	$(OLDEST)/bin/python -m tests.floors

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs                       ## build the documentation, strictly
	$(BIN)/mkdocs build --strict

wheel:                                    ## build a wheel, install it in a clean environment, and use it there
	rm -rf dist build .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	PYTHONWARNINGS=ignore .venv-wheel/bin/pip wheel -q --no-deps --wheel-dir dist .
	PYTHONWARNINGS=ignore .venv-wheel/bin/pip install -q torch==$$(sed -n 's/^torch==//p' constraints.txt)
	PYTHONWARNINGS=ignore .venv-wheel/bin/pip install -q -c constraints.txt dist/*.whl
	cd dist && ../.venv-wheel/bin/vembed version \
	    && ../.venv-wheel/bin/vembed config model_name=a data_path=../README.md accelerate_config=accelerate_ddp

bench-quick: $(VENV)/.dev                 ## ratios to sentence-transformers in about 3 minutes
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.train --peer sentence-transformers --quick

bench-gpu: $(VENV)/.dev                   ## speed, memory and correctness on one GPU; without one, with tiny models on the CPU
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.gpu

chaos: $(VENV)/.dev                       ## kill, truncate and resume a real run, ROUNDS times
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.stress.chaos --rounds $(ROUNDS)

# One process per GPU; two on a CPU.
TRAIN_FREE = HF_HUB_OFFLINE=1 $(BIN)/torchrun \
    --nproc_per_node=$(or $(NPROC),$(shell n=$$(nvidia-smi -L 2>/dev/null | grep -c ^GPU); echo $$(( n > 0 ? n : 2 )))) \
    examples/train_free.py --config configs/free_transformer.yaml --use-fsdp

train-free-fsdp: $(VENV)/.dev             ## the Free Transformer, sharded over all devices
	$(TRAIN_FREE) --output checkpoints/free_fsdp $(OPTIONS)

train-baseline-fsdp: $(VENV)/.dev         ## the same decoder without its latent, to compare
	$(TRAIN_FREE) --baseline --output checkpoints/baseline_fsdp $(OPTIONS)

clean:
	rm -rf $(VENV) $(OLDEST) .venv-wheel build dist site *.egg-info

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip

# torch first and by its exact version: a bare `torch` would bring gigabytes of CUDA to a machine without a GPU.
$(VENV)/.torch: constraints.txt | $(BIN)/pip
	$(INSTALL) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	touch $@

$(OLDEST)/.installed: pyproject.toml constraints-min.txt
	$(PYTHON) -m venv $(OLDEST)
	PYTHONWARNINGS=ignore $(OLDEST)/bin/pip install -q --no-compile $$(grep ^torch== constraints-min.txt)
	PYTHONWARNINGS=ignore $(OLDEST)/bin/pip install -q --no-compile -c constraints-min.txt -e .
	touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(INSTALL) -c constraints.txt -e ".[demo]"
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(INSTALL) -c constraints.txt -e ".[dev]"
	touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.torch
	$(INSTALL) -c constraints.txt -e ".[docs]"
	touch $@
