# Everything runs inside .venv, made on first use from pyproject.toml and the exact versions in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MINUTES ?= 60
TYPES_OF_BENCHMARKS := MYPYPATH=src:benchmarks $(BIN)/mypy benchmarks/*.py
# Hundreds of processes start in the tests; without bytecode on disk each of them compiles our sources again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-engines test-slow test-properties check format bench bench-gpu chaos soak pictures docs clean help

help:
	@echo "make demo    train, lose workers on the way, and end with the same weights"
	@echo "make test    run the tests: about fifteen minutes on two cores"
	@echo "make test-engines   run the tests with Slurm, Ray, Kubernetes pods, etcd, a browser and three machines, as far as they are installed"
	@echo "make test-slow   run the tests that the others leave out: about a quarter of an hour"
	@echo "make test-properties   try all examples of properties; make test tries a part of them"
	@echo "make check   format, lint, types, layers: what every commit must pass"
	@echo "make bench   measure plans, simulator and runtime, print the tables"
	@echo "make chaos   two million simulated schedules of failures, and failures of real processes: hours"
	@echo "make soak    one job under random faults, for MINUTES=60"
	@echo "make pictures   draw the pictures of the documents anew"
	@echo "make docs    build the site into build/site"

# The pip of an older Python takes twice as long. Bytecode of 200 packages, of which a command uses few, is not made here: Python
# makes it when it first imports a module.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "ReCycle needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --upgrade pip
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev,docs]'
	@touch $(READY)

demo: $(READY)
	@rm -rf build/demo
	@$(BIN)/recycle demo --dashboard 0 --allow-injection --out build/demo

# Tests of engines start servers, and wait for them more than they compute: three of these files run at a time, apart from other tests.
ENGINES := tests/integrations/test_slurm.py tests/integrations/test_ray.py tests/integrations/test_kubernetes_processes.py \
	tests/chaos/test_three_machines.py $(wildcard tests/dashboard/test_browser*.py) tests/control/store/test_etcd_store.py \
	tests/control/store/test_etcd_access.py tests/cli/machines/test_high_availability.py
FUZZED := tests/control/net/test_man_in_the_middle.py
IN_PARALLEL := $(BIN)/pytest -n 4 --dist worksteal

# The kernels of the planner and the assertions of tests are compiled once, beside the types, and not by every test process.
test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m compileall -q src
	$(BIN)/python -c 'import sys, tests.preload, pytest; sys.exit(pytest.main(["--collect-only", "-qq"]))' > /dev/null \
	&& $(BIN)/pytest -qq tests/test_layers.py & \
	($(BIN)/mypy && $(TYPES_OF_BENCHMARKS)) && wait $$!
	SHARE_OF_EXAMPLES=0.3 $(IN_PARALLEL) -m "not slow" $(addprefix --ignore=,tests/test_layers.py $(ENGINES))

test-engines: $(READY)
	$(BIN)/pytest -n 3 --dist loadfile -m "not slow" $(ENGINES) \
		$(FUZZED)::test_fuzzed_frames_before_the_handshake_disturb_nobody \
		$(FUZZED)::test_fuzzed_frames_of_a_member_close_its_own_connection_only

test-slow: $(READY)
	$(IN_PARALLEL) -m slow

# All examples of the properties, of which `make test` tries a part.
test-properties: $(READY)
	$(IN_PARALLEL) -m hypothesis

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(TYPES_OF_BENCHMARKS)
	$(BIN)/pytest tests/test_layers.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/advise.py
	$(BIN)/python benchmarks/runtime.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/control.py
	$(BIN)/python benchmarks/uneven.py
	$(BIN)/python benchmarks/state_memory.py
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/slow_worker.py
	$(BIN)/python benchmarks/cores.py
	$(BIN)/python benchmarks/dashboard.py

bench-gpu: $(READY)
	PYTHONPATH=. $(BIN)/python benchmarks/nccl.py
	$(BIN)/python benchmarks/launch_ahead.py

soak: $(READY)
	$(BIN)/python -m tests.chaos.soak --minutes $(MINUTES)

chaos: $(READY)
	$(BIN)/python -m tests.control.decide.schedules --num 1000000
	$(BIN)/python -m tests.chaos.control_plane --num 1000000
	FUZZED_FRAMES=10000 $(BIN)/pytest $(FUZZED) -k fuzzed
	$(BIN)/python -m tests.chaos.kill_points
	$(BIN)/python -m tests.chaos.external_faults --num 500
	$(BIN)/python -m tests.chaos.machines
	$(BIN)/python -m tests.chaos.three_machines
	$(BIN)/python -m tests.chaos.resources

pictures: $(READY)
	$(BIN)/python docs/pictures/make.py
	$(BIN)/python docs/pictures/page_pictures.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
