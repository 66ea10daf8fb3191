# The only entry. `make help` lists it.
.DEFAULT_GOAL := help
.PHONY: help demo demo-stop model build images cluster-up cluster-down test test-long test-node lint bench mutants

# Where the demo's router listens.
HTTP ?= 127.0.0.1:8080
# How many nodes a cluster on this machine has.
NODES ?= 2
# Where the images' binaries come from: `source` compiles them inside of the images' build, `prebuilt` takes this machine's.
BUILD ?= prebuilt
# Which benches run.
BENCH ?= engine router
# Paired rounds of each.
ROUNDS ?= 5

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: ## build, fetch the model, start prefill, decode and router, ask a question; leaves them running (HTTP=HOST:PORT)
	@scripts/venv.sh && .venv/bin/python scripts/demo.py start --http $(HTTP)

demo-stop: ## stop what `make demo` started
	@python3 scripts/demo.py stop

model: ## fetch the demo's model into .demo/models
	@scripts/venv.sh && .venv/bin/python scripts/model.py

build: ## the binaries, into target/release
	cargo build --release --workspace --locked --bins

images: ## the container images, into target/images too (BUILD=source: compiled in the image's build)
	@python3 scripts/images.py --build $(BUILD)

cluster-up: ## as root, on Linux: Kubernetes on this machine with Tandem's images and the model (NODES=2)
	@python3 scripts/cluster up --nodes $(NODES) --build $(BUILD)

cluster-down: ## remove all of it
	@python3 scripts/cluster down

test: ## the whole suite: lints, unit, golden, process, control-plane and client tests
	@python3 scripts/test.py

test-long: ## what takes longer: soaks, numerics, a public load generator, fuzzing
	@python3 scripts/test.py --long

test-node: ## as root, on Linux: the tests on real nodes
	@python3 scripts/test.py --tier node

lint: ## format, clippy, licences and sources of dependencies
	@scripts/lint.sh

mutants: ## change the planner in each way that cargo-mutants knows, and see whether its tests fail: the kill rate and the survivors
	@scripts/mutants.sh

bench: ## engine and router beside their peers, as ratios; builds the peers once (BENCH="engine", "router", "numerics" or "load" for a part)
	@python3 bench/run.py $(BENCH) --rounds $(ROUNDS)
