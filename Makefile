VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin

.PHONY: chat check demo serve test test-all wheel
.DEFAULT_GOAL := demo

OFFLINE = { echo "the packages cannot be installed: connect to the network, or tell pip of a mirror (PIP_INDEX_URL) or a folder of \
	wheels (PIP_FIND_LINKS), and run the command again" >&2; exit 1; }

# torch is named by itself: what an index serves by default may be a build for hardware that is not there.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch, this project and what develops it into $(VENV)"
	@$(BIN)/pip install --quiet --upgrade pip
	@$(BIN)/pip install --quiet torch==2.13.0 || $(OFFLINE)
	@$(BIN)/pip install --quiet -e .[export,serve,dev] || $(OFFLINE)
	touch $@

demo: build/chat/gumiho.json
	$(BIN)/python -m tools.demo build/chat --name SmolLM2-135M-Instruct --trace build/demo.html $(DEMO)

# Not quantized: a model this small loses its thread when its numbers are rounded.
build/chat/gumiho.json: $(VENV)/ready
	$(BIN)/gumiho fetch smollm2 --out build/smollm2
	test -f $@ || $(BIN)/gumiho-export --ckpt demo/smollm2-drafter --target build/smollm2 --weights none --out build/chat --overwrite

chat: build/chat/gumiho.json
	$(BIN)/gumiho chat build/chat

serve: build/chat/gumiho.json
	$(BIN)/gumiho serve build/chat

# A file's tests share fixtures, so one process runs them. Files keep their order: the longest, in end_to_end, come first.
PYTEST = $(BIN)/pytest --numprocesses=auto --maxprocesses=8 --dist=loadfile --no-loadscope-reorder

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples

test: check
	$(PYTEST)

test-all: check
	$(PYTEST) -m "" --hypothesis-profile=exhaustive

# The package as users install it, from another folder: its commands run, and type checkers see its types.
wheel: $(VENV)/ready
	rm -rf build/lib build/wheel && $(PYTHON) -m venv build/wheel
	build/wheel/bin/pip install --quiet .
	cd build && wheel/bin/gumiho --version && wheel/bin/gumiho doctor --backend cpu
	cd build && $(abspath $(BIN))/mypy --strict --config-file= --python-executable wheel/bin/python ../examples
