# The common tasks. tasks.py does the work; without make, call it yourself.
#
#   make train                  a first model in a few minutes, text from it and its report
#   make train TEXT=novel.txt   the same on your own text
#   make train TO=novel.gguf    the same, and a file for llama.cpp and Ollama (TO=my-model: a folder for transformers)
#   make train ARGS="--max_iters=5000 --n_embd=256"   with other settings
#   make chat                   a model from nothing that answers sums, spelling and more, in ten minutes; ends with a page
#   make test                   the quick tests
#   make test-all               all tests but the nightly ones
#   make test-nightly           emulated machines, several hosts, most hacks, notebook, browser
#   make check                  lint and types
#   make qualify                checks and measures this card; ARGS="--minutes=9" in less time (docs/figures.md)
#   make check-cards            compiles our configs' kernels for cards that are not here (Linux; docs/figures.md)

PYTHON ?= python3
VENV ?= .venv
OUT ?=
TEXT ?=
TO ?=
ARGS ?=

.PHONY: help train chat test test-all test-nightly check qualify check-cards

help:
	@sed -n 's/^#   //p' Makefile

train:
	@$(PYTHON) tasks.py train --venv "$(VENV)" --out "$(OUT)" --text "$(TEXT)" --to "$(TO)" -- $(ARGS)

chat:
	@$(PYTHON) tasks.py chat --venv "$(VENV)" --out "$(OUT)" -- $(ARGS)

test test-all test-nightly check qualify check-cards:
	@$(PYTHON) tasks.py $@ --venv "$(VENV)" -- $(ARGS)
