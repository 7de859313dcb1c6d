# make demo | test | build | lint | bench | clean. The first use sets everything up in .venv; nothing else is touched.
# A Python that already has torch (PYTHON=... chooses it) shares its packages with .venv: nothing is downloaded where they are complete,
# so that a GPU machine without network works. Elsewhere torch and the tested versions (constraints.txt) come from PyPI.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# Without a GPU one worker per core, at most 8, with one none (tests/conftest.py), where pytest-xdist is there.
PYTEST_FLAGS ?= $(shell $(RUN) -c 'import xdist' 2>/dev/null && echo --numprocesses auto)
VENV := .venv
RUN := $(VENV)/bin/python
NEEDED := torch, transformers, peft, accelerate, tokenizers, matplotlib, pytest, pytest_timeout, setuptools
# Of a shared Python, where .venv has none of its own.
CLANG_FORMAT = $(or $(wildcard $(VENV)/bin/clang-format),$(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/clang-format)
CPP_SOURCES = $(shell find csrc tests/emulator -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp')

.PHONY: demo test build lint format bench clean

demo: build
	$(RUN) examples/finetune_lora.py --demo

test: build
	$(RUN) -m pytest $(PYTEST_FLAGS)

# STRICT=1: no compiler, register spills and serialised wgmma are errors, as in CI.
build: $(VENV)/.ready
	$(RUN) hf_flash2/build.py $(if $(STRICT),--strict,--if-possible)

bench: build
	$(RUN) -m hf_flash2 bench attention

lint: $(VENV)/.ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run --Werror $(CPP_SOURCES)

format: $(VENV)/.ready
	$(RUN) -m ruff format .
	$(CLANG_FORMAT) -i $(CPP_SOURCES)

SET_UP_BY := pyproject.toml setup.py constraints.txt
# Again in a clone that was moved or copied, where .venv has the package of the other place, and where its Python is gone.
ifneq ($(shell cat $(VENV)/.ready 2>/dev/null)$(if $(realpath $(RUN)),, without Python),$(CURDIR))
.PHONY: $(VENV)/.ready
endif

# One at a time: a second make waits, and finds it done.
ifndef SETTING_UP
$(VENV)/.ready: $(SET_UP_BY)
	@mkdir -p build
	@flock build/set_up.lock $(MAKE) --no-print-directory SETTING_UP=1 $@
else
$(VENV)/.ready: $(SET_UP_BY)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed, $(PYTHON) is " + sys.version)'
	$(PYTHON) -m venv --clear $(VENV)
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then \
		echo 'sharing the packages of $(PYTHON)'; \
		$(PYTHON) -c 'import sys; print(*[path for path in sys.path if path.endswith("-packages")], sep="\n")' \
			> "$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared_packages.pth"; \
		$(RUN) -m pip uninstall --quiet --yes setuptools; : 'the old one that venv brings would hide the shared one'; \
	fi
	@if $(RUN) -c 'import $(NEEDED); assert int(setuptools.__version__.split(".")[0]) >= 77' 2>/dev/null; then \
		echo 'every package is there: installing without downloads'; \
		$(RUN) -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .; \
	else \
		$(RUN) -c 'import torch' 2>/dev/null || torch='$(TORCH)'; \
		$(RUN) -m pip install --disable-pip-version-check --constraint constraints.txt $$torch --editable '.[test,examples,lint,build]'; \
	fi
	@pwd -P > $@
endif

clean:
	rm -rf $(VENV) build dist *.egg-info hf_flash2/libhf_flash2.so
