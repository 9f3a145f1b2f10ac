# Every target sets up .venv by itself. TRACE, JSON and ARGS go to `make demo`; ARGS also to `make up`.
PY := .venv/bin/python

.PHONY: setup up demo test check bench replay-full lock

setup:
	@sh scripts/setup.sh

up: setup
	@.venv/bin/kyb up $(ARGS)

demo: setup
	@.venv/bin/kyb demo $(if $(TRACE),--trace $(TRACE)) $(if $(JSON),--json $(JSON)) $(ARGS)

test: setup
	@sh scripts/test.sh $(ARGS)

check: setup
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PY) scripts/generate.py --check
	sh scripts/generate_pb.sh --check

bench: setup
	@$(PY) -m bench $(ARGS)

replay-full: setup
	@sh scripts/replay.sh full

lock: setup
	@sh scripts/lock.sh
