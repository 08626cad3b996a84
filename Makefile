# Every target sets up what it needs first; see `make help`.

SHELL := /bin/bash
# What `make setup` may just have installed is found without a new login.
export PATH := $(HOME)/.cargo/bin:$(PATH)

# When this began, for scripts/test.sh, which says how long it took with all set-up.
export SETUP_BEGAN := $(shell date +%s)

# Seconds of fuzzing, shared by all targets.
TIME ?= 60
# How `make endurance` makes it hard: stress, onecpu, random or stopped.
KIND ?= stress

.PHONY: help setup build build-lab demo demo-graft lint test test-all peers endurance fuzz model kernels soak bench pictures picture web web-test site reference clean-lab install install-graft install-gate install-messages examples image
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install what is missing (apt, Rust); says what it does, asks nothing
	@scripts/setup.sh

build: setup ## the release binary, target/release/millrace
	cargo build --release --locked -p millrace

demo: setup ## live video from a publisher through the relay to two players, with both engines
	cargo build --locked -p millrace
	@scripts/demo.sh

demo-graft: setup ## curl and a web server over a path like a satellite's: plain TCP, and carried (root)
	cargo build --locked -p millrace -p millrace-lab
	@scripts/demo-graft.sh

lint: setup ## formatting and lints
	@scripts/lint.sh

test: setup ## lint, units, every feature end to end with both engines, the web pages in Chromium
	@scripts/test.sh

test-all: setup ## what `make test` leaves out: peers that have to be built, benchmarks, walks through all docs
	@scripts/setup.sh study
	@scripts/test.sh rest

endurance: setup ## what the last `make test` built, once, made hard: KIND=stress|onecpu|random|stopped (SEED=N: as it was)
	@scripts/setup.sh test
	@scripts/setup.sh endurance
	@scripts/test.sh endure $(KIND)

peers: setup ## build the MoQ peers that interop tests and benchmarks use (all of them)
	scripts/peers.sh all

fuzz: setup ## fuzz every parser for TIME seconds in all (make fuzz TIME=600)
	@scripts/setup.sh fuzz
	@scripts/fuzz.sh $(TIME)

model: setup ## every interleaving of two senders that draw packet numbers (loom)
	RUSTFLAGS="--cfg loom" cargo test -p millrace-quic --release --lib number --target-dir target/loom

kernels: setup ## BPF programs and forwarding on Debian's 6.1 and 6.12 (QEMU) and on the running kernel
	@scripts/setup.sh kernels
	@scripts/kernels.sh

build-lab: build
	cargo build --release --locked -p millrace-lab

soak: build-lab ## with each engine ten minutes of loss, reordering and churn; hostile clients, 10^7 forged packets, 200 carriers cut, the matrix of faults, an hour of observing, README and docs (or SOAK_SECONDS each)
	@scripts/setup.sh soak
	@scripts/soak.sh
	@scripts/soak-hostile.sh
	@scripts/soak-cost.sh
	@scripts/soak-faults.sh
	@scripts/walk.py target/release/millrace --whole
	@cargo test --locked -q -p millrace-relay-kernel --lib -- --ignored --nocapture ten_million_forged_packets_are_not_forwarded
	@cargo test --locked -q -p millrace --test graft -- --ignored --nocapture two_hundred

bench: build-lab peers ## compare relays, share a bottleneck, adapt, meet hostile clients, watch in a browser; results in target/bench*.json
	@scripts/setup.sh bench
	@scripts/setup.sh web
	target/release/millrace-lab bench relay --json target/bench.json --plot target/bench.svg
	target/release/millrace-lab bench fairness --json target/bench-fairness.json
	target/release/millrace-lab bench adapt --json target/bench-adapt.json
	target/release/millrace-lab bench hostile --json target/bench-hostile.json
	target/release/millrace-lab bench watch --json target/bench-watch.json --screenshots target/bench-watch

picture: ## draw ARCHITECTURE's picture anew (graphviz); the result is committed
	dot -Tsvg docs/notes/architecture.dot -o docs/notes/architecture.svg

web: setup ## build the web pages anew (node); what is built is committed
	@scripts/setup.sh web
	@scripts/web.sh build

web-test: setup ## the web pages in headless Chromium; screenshots in target/web
	@scripts/setup.sh web
	@scripts/web.sh test

site: setup ## the documentation as a site, target/site: a broken link or a page outside the navigation fails it (Zensical, from PyPI)
	@scripts/site.sh

reference: ## write docs/reference anew from the code; the result is committed
	@scripts/reference.py

clean-lab: ## remove namespaces that dead lab runs left behind
	@scripts/clean-lab.sh

examples: setup ## the gate's example servers, built and run (in C: libngtcp2-dev libngtcp2-crypto-gnutls-dev; Go)
	@scripts/setup.sh test
	cargo test --locked -p millrace-gate
	cargo test --locked -p millrace --test gate

image: build ## a container image out of the release binary, target/image.tar
	@scripts/image.sh

PREFIX ?= /usr/local
GATE_BUILD ?= target/release
GATE_VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n1)

install: build ## the binary; libraries, headers and pkg-config files of gate and messages (PREFIX, DESTDIR)
	cargo build --release --locked -p millrace-gate -p millrace-messages
	install -D -m 755 target/release/millrace $(DESTDIR)$(PREFIX)/bin/millrace
	$(MAKE) --no-print-directory install-graft install-gate install-messages

# The headers that grafts are written against.
install-graft:
	install -d $(DESTDIR)$(PREFIX)/include/millrace
	install -m 644 graft/kernel/src/bpf/graft.h graft/kernel/src/bpf/graft_packet.h kernel/src/bpf/bpf_map.h \
		$(DESTDIR)$(PREFIX)/include/millrace

# What is built already, in GATE_BUILD. The sonames are build.rs's.
install-gate: FOLDER = gate
install-messages: FOLDER = graft/messages
install-gate install-messages: install-%:
	install -D -m 755 $(GATE_BUILD)/libmillrace_$*.so $(DESTDIR)$(PREFIX)/lib/libmillrace_$*.so.$(GATE_VERSION)
	ln -sf libmillrace_$*.so.$(GATE_VERSION) $(DESTDIR)$(PREFIX)/lib/libmillrace_$*.so.0
	ln -sf libmillrace_$*.so.0 $(DESTDIR)$(PREFIX)/lib/libmillrace_$*.so
	install -D -m 644 $(FOLDER)/include/millrace_$*.h $(DESTDIR)$(PREFIX)/include/millrace_$*.h
	install -d $(DESTDIR)$(PREFIX)/lib/pkgconfig
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@VERSION@|$(GATE_VERSION)|' $(FOLDER)/millrace-$*.pc.in \
		>$(DESTDIR)$(PREFIX)/lib/pkgconfig/millrace-$*.pc
