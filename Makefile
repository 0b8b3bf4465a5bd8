# Needs python3 (3.11 to 3.13) and make. Everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Most tests wait for something, so more of them than there are cores.
PARALLEL := -n 4 --dist worksteal
# How tests are run: `.ci/run` puts its own script here, which runs what failed once more.
PYTEST := -m pytest
# Prints the requirements of the development groups named in argv, with every extra, for pip.
REQUIREMENTS := import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
	print("-e .[%s]" % ",".join(project["project"]["optional-dependencies"])); \
	print(*(line for group in sys.argv[1:] for line in project["dependency-groups"][group]), sep="\n")

# Seven times as quick as pip, which does it where uv cannot reach what pip is set up to reach.
INSTALL = install() { $(BIN)/uv pip install --quiet --system-certs --python $(BIN)/python "$$@" 2>/dev/null || \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$@"; }; install

APT := DEBIAN_FRONTEND=noninteractive apt-get install -y -qq
PROGRAMS := $(or $(SMOKEBOX_RUNSC),runsc)=runsc vttest=vttest chromium=chromium postgres=postgresql \
	systemd-analyze=systemd mkfs.xfs=xfsprogs linux.uml=user-mode-linux busybox=busybox-static \
	docker-registry=docker-registry skopeo=skopeo umoci=umoci htpasswd=apache2-utils buildah=buildah \
	mmdebstrap=mmdebstrap

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help start test soak check lint format bench clean programs

help:
	@echo "make start   install, run a server here, and say what to try from another shell"
	@echo "make test    install what the tests need and run them"
	@echo "make soak    kill the engine 500 times, and load it for an hour beside a hostile tenant"
	@echo "make check   format, lint, types and tests, as before every commit"
	@echo "make lint    format, lint and types only"
	@echo "make format  put the code into form"
	@echo "make bench   compare with other tools on this machine"
	@echo "make clean   remove .venv and what the tools left behind"

start: $(VENV)/.installed
	@$(BIN)/smokebox serve --show

test: $(VENV)/.installed-dev $(VENV)/js/.installed $(VENV)/vite/.installed programs
	@$(BIN)/python $(PYTEST) $(PARALLEL) --ignore=tests/soak
	@# By itself: a hostile tenant takes the CPU from every other test.
	@$(BIN)/python $(PYTEST) tests/soak

soak: $(VENV)/.installed-dev
	@SMOKEBOX_CRASH_ROUNDS=500 $(BIN)/python -m pytest tests/crash
	@SMOKEBOX_SOAK=1 $(BIN)/python -m pytest -s tests/soak
	@SMOKEBOX_SOAK=1 $(BIN)/python -m pytest $(PARALLEL) \
		tests/engine/test_leftovers.py tests/engine/terminals tests/server/test_schemathesis.py \
		tests/engine/mounts tests/sandbox/test_bucket.py tests/integrations/test_unprivileged.py tests/app/test_load.py \
		tests/engine/images/build/test_oracle.py

check: lint test

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Debian's programs that tests need, and their packages. Where they cannot be installed, their tests
# are skipped, except those of gVisor, which fail when root runs them.
programs:
	@for pair in $(PROGRAMS); do \
		program=$${pair%=*} package=$${pair#*=}; \
		command -v "$$program" >/dev/null || ls /usr/lib/*/*/bin/"$$program" >/dev/null 2>&1 || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		{ $(APT) $$package || { apt-get update -qq && $(APT) $$package; }; } >/dev/null 2>&1; } || \
		echo "smokebox: no $$program here, which tests need; as root: apt-get install -y $$package"; \
	done

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: PROGRAMS := buildah=buildah busybox=busybox-static docker-registry=docker-registry skopeo=skopeo \
	umoci=umoci nginx=nginx-light wrk=wrk caddy=caddy s3fs=s3fs rclone=rclone zstd=zstd \
	mksquashfs=squashfs-tools restic=restic
bench: $(VENV)/.installed-bench programs
	@set -e; for script in $(filter-out %/table.py %/compare.py,$(wildcard bench/*.py)); do echo "== $$script"; $(BIN)/python "$$script"; done

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || \
		{ echo "smokebox: $(PYTHON) is not installed; install Python 3.11, 3.12 or 3.13" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "smokebox: $$($(PYTHON) -V 2>&1) does not fit; run make PYTHON=python3.11 (up to 3.13)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) >/dev/null || { rm -rf $(VENV); \
		echo "smokebox: $(PYTHON) cannot make a virtualenv; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.11,<0.14' || \
		echo "smokebox: uv cannot be installed: pip does it, which takes longer"

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing Smokebox into $(VENV) ..."
	@$(INSTALL) -e '.[bucket,models,shell]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "Installing Smokebox and what its tests need into $(VENV) ..."
	@$(BIN)/python -c '$(REQUIREMENTS)' dev > $(VENV)/requirements.txt
	@$(INSTALL) -r $(VENV)/requirements.txt
	@touch $(VENV)/.installed $@

$(VENV)/.installed-bench: pyproject.toml | $(BIN)/python
	@echo "Installing Smokebox and what it is compared with into $(VENV) ..."
	@$(BIN)/python -c '$(REQUIREMENTS)' dev bench > $(VENV)/requirements.txt
	@$(INSTALL) -r $(VENV)/requirements.txt
	@touch $(VENV)/.installed $(VENV)/.installed-dev $@

# OpenAI's JavaScript client, which speaks to our server in one test, and Vite, which is seen
# through a preview in another.
$(VENV)/js/.installed: tests/server/compat/js/package.json
$(VENV)/vite/.installed: tests/server/vite/package.json
$(VENV)/js/.installed $(VENV)/vite/.installed: | $(BIN)/python
	@mkdir -p $(@D) && cp $< $(@D)/
	@command -v npm >/dev/null || { echo "smokebox: no npm here: the tests with what $< names are skipped; install Node 20"; exit 0; }; \
		npm install --prefix $(@D) --no-audit --no-fund --no-package-lock --loglevel=error >/dev/null && touch $@
