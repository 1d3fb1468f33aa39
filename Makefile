# What people type often. `make train` and `make test` do all the set-up they need.
#
#   make train                  a first model in a few minutes, and text from it
#   make train TEXT=input.txt   the same on your own text
#   make train ARGS="--max_iters=5000 --n_embd=256"   with other settings
#   make test                   the test suite
#   make check                  lint and types
#   make clean                  remove the environment and caches; data and runs stay

PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
OUT ?= out-first
TEXT ?=
ARGS ?=

.PHONY: train test check clean

# Whole only once everything is installed: an interrupted installation is begun again.
$(VENV)/.run: requirements.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.run
	$(PY) -m pip install --quiet -r requirements-dev.txt
	touch $@

train: $(VENV)/.run
	@set -e; \
	if [ -n "$(TEXT)" ]; then data=own_text; $(PY) data/text/prepare.py "$(TEXT)" --name $$data; \
	elif [ -f data/shakespeare_char/val.bin ]; then data=shakespeare_char; \
	elif [ -f data/python_char/val.bin ] && [ ! -f data/shakespeare_char/input.txt ]; then data=python_char; \
	elif said=$$($(PY) data/shakespeare_char/prepare.py 2>&1); then data=shakespeare_char; echo "$$said"; \
	else echo "No Shakespeare ($$said): training on the source code of Python's standard library instead."; \
		data=python_char; $(PY) data/python_char/prepare.py; fi; \
	set -x; \
	$(PY) train.py config/train_shakespeare_char_fast.py --dataset=$$data --out_dir=$(OUT) $(ARGS); \
	$(PY) sample.py --out_dir=$(OUT) --num_samples=3 --max_new_tokens=300

test: $(VENV)/.dev
	$(PY) -m pytest -n 2 --dist=worksteal

check: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
