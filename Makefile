# make demo and make test need Python 3.11 or newer and nothing else; what they set up in .venv is used again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

.PHONY: demo test gpu-test setup

demo: setup
	$(BIN)/flash-compare recipes=demo arms=[naive,sdpa,flash] lengths=[512,1024,2048]

# The kernels run in Triton's interpreter, which has to be chosen before Triton is first imported. A process a core, and
# each file in one of them, for what its tests share is made once.
test: setup
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m "not gpu" -n auto --dist loadfile

gpu-test: setup
	$(BIN)/python -m pytest -m gpu

setup: $(READY)

# The stamp comes last, so that an installation that broke off is begun again.
$(READY): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[dev]'
	@touch $@
