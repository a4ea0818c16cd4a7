.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Empty: a fitting one is looked for, tools/find_python.sh.
PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
TYPED := $(wildcard mscheduler_sync tests examples benchmarks)

# Prints what the environment is made of: interpreter, place, requirements. A changed line means: install again.
define DESCRIBE
import hashlib, os, sys
version = "%d.%d.%d" % sys.version_info[:3]
if sys.version_info < (3, 10):
    sys.exit("Python 3.10 or newer is needed, %s is %s. Choose one: make PYTHON=python3.12 ..." % (sys.executable, version))
print(version, os.getcwd(), hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest())
endef

define NEWER
This Python is newer than those that the embedded server is built for (3.10 to 3.13): installing without it.
Linting, types and the tests without a server work. Tests that need a server are skipped, the demonstrations
do not run: set MSCHEDULER_URI to a server of yours, or choose another Python, make PYTHON=python3.13 ...
endef

.PHONY: help
help: ## Show the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "  PYTHON=python3.12 chooses the interpreter (3.10 to 3.13; else one is found)"

.PHONY: install
install: export DESCRIBE := $(DESCRIBE)
install: export NEWER := $(NEWER)
install: ## Make .venv with the library and the tools, unless it is up to date
	@set -e; \
	python="$(PYTHON)"; \
	[ -n "$$python" ] || python="$$(sh tools/find_python.sh)"; \
	wanted="$$("$$python" -c "$$DESCRIBE")"; \
	if [ "$$(cat $(VENV)/.installed 2>/dev/null)" != "$$wanted" ]; then \
		echo "installing into $(VENV) (a minute or two): Python $${wanted%% *}"; \
		case "$$wanted" in 3.1[0-3].*) ;; *) echo "$$NEWER" >&2 ;; esac; \
		case "$$(cat $(VENV)/.installed 2>/dev/null)" in "$${wanted% *} "*) ;; *) rm -rf $(VENV) ;; esac; \
		rm -f $(VENV)/.installed; \
		"$$python" -m venv $(VENV); \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[embedded,dev]'; \
		echo "$$wanted" > $(VENV)/.installed; \
	fi

.PHONY: demo
demo: install ## Run the demonstration on an embedded server
	@$(BIN)/python examples/demo.py

.PHONY: demo-pool
demo-pool: install ## Show a fleet of pollers that loses a process
	@$(BIN)/python examples/pool_pollers.py

# The tests wait most of the time, for leases to end and servers to come back: six at once, each with its own
# server. On a given server one after the other: fail points hold for all that talk to it.
PYTEST := $(BIN)/python -m pytest $(if $(MSCHEDULER_URI),,-n 6 --dist worksteal)
# They start Python some two hundred times: it need not compile the library anew each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test
test: install ## Run the unit, integration and fault tests
	@$(PYTEST)

.PHONY: test-unit
test-unit: install ## Run the tests that need no server
	@$(BIN)/python -m pytest tests/unit

.PHONY: test-all
test-all: install ## Run every test but soak and bench
	@$(PYTEST) -m 'not soak and not bench'

.PHONY: stress
stress: install ## Run the stress tests (minutes)
	@$(BIN)/python -m pytest -m stress

.PHONY: soak
soak: install ## Kill, freeze and cut a fleet at random (MINUTES=10 SEED=...)
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

.PHONY: bench
bench: install ## Measure beside the floor that the server sets (half an hour)
	@$(BIN)/python -m benchmarks

.PHONY: bench-quick
bench-quick: install ## Measure roughly (two minutes)
	@$(BIN)/python -m benchmarks --quick

.PHONY: lint
lint: install ## Check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

.PHONY: type
type: install ## Check the types
	@$(BIN)/mypy $(TYPED)

.PHONY: fmt
fmt: install ## Format the code and apply safe fixes
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

.PHONY: check
check: lint type test ## Run everything that a change must pass

.PHONY: build
build: install ## Build the wheel and the source archive into dist/
	@$(BIN)/python -m build --outdir dist .

.PHONY: clean
clean: ## Remove .venv, caches and build results
	@rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find mscheduler_sync tests $(wildcard examples benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +
