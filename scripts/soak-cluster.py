#!/usr/bin/env python3
"""Runs a cluster through failures, and counts the objects that its viewers lost.

    scripts/soak-cluster.py [BINARY] [--seconds 1800] [--publishers 20] [--viewers 200] [--seed N] [--only KIND,...] [--json FILE]
                            [--logs FOLDER] [--moq-relay PROGRAM]

Five relays find each other through etcd of three members, all with mutual TLS, each in a network namespace. Publishers send 10 objects of
1,200 bytes a second to three of the relays; viewers watch at all five. One failure follows the other, in an order that the seed decides:

    relay-killed     a relay is killed, and started again after its lease has ended
    link-cut         no packet passes between two relays for 5 to 20 s
    split            no packet passes between two and three relays, with etcd divided as well, for 5 to 20 s
    leader-killed    etcd's leader is killed, and started again after 10 s
    etcd-away        all of etcd is stopped for 60 s
    clock-jump       a relay's wall clock is an hour ahead, or behind, for 20 s (libfaketime)

An object is owed to a viewer if it was published between the viewer's first and last object. That holds also if the viewer's own relay,
or the publisher's, was killed at that time, since the publisher has the object in its history; these are counted apart.

With --moq-relay two of the five relays are moq-relay (moq-dev), which connect to the others by list, and a third of the publishers connect to
one of them. What viewers of a moq-relay or of its publishers lose or get twice is counted apart, and so is what is lost while one is killed.

The run fails if an object that is owed never came, if one came twice, if a route has a hop twice, if the
store has a killed relay after its lease, if an object is damaged, or if a viewer has nothing more at the end. Needs root, etcd-server, nftables, curl, and faketime for jumps of the clock.
"""

import argparse
import csv
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hosts
from hosts import Host, call, wait_for

ROOT = Path(__file__).resolve().parent.parent
RELAYS = [f"relay-{number}" for number in range(1, 6)]
ETCD = [f"etcd-{number}" for number in range(1, 4)]
RATE_HZ = 10
LEASE = 5
# cache-seconds of the relays, and the publishers' history.
CACHE = 30
# Seconds without a failure between two of them.
CALM = 15
# Seconds around a failure in which its effects count as its own.
BEFORE, AFTER = 2, 12
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)

SETTINGS = f"""
listen = [":4443"]
cache-seconds = {CACHE}
max-delay = "off"
tls-cert = "/etc/millrace/relay.pem"
tls-key = "/etc/millrace/relay.key"
client-ca = "/etc/millrace/ca.pem"
upstream-tls-root = "/etc/millrace/ca.pem"
upstream-tls-cert = "/etc/millrace/relay.pem"
upstream-tls-key = "/etc/millrace/relay.key"
[[allow]]
namespace = "live/**"
publish = ["cidr:10.88.0.0/24", "cert:*"]
subscribe = ["anyone"]
[discovery]
etcd = {json.dumps([f"https://{name}:2379" for name in ETCD])}
lease = "{LEASE}s"
namespaces = ["live/**"]
tls-root = "/etc/millrace/ca.pem"
tls-cert = "/etc/millrace/relay.pem"
tls-key = "/etc/millrace/relay.key"
"""


def main():
    options = parse()
    if os.geteuid() != 0 or not shutil.which("etcd") or not shutil.which("nft"):
        print("SKIP: needs root, etcd-server and nftables")
        return 0
    if os.getpid() != 1:
        inside = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, __file__]
        os.execvp(inside[0], [*inside, *sys.argv[1:], "--seed", str(options.seed)])
    with tempfile.TemporaryDirectory() as folder:
        result = Cluster(options, Path(folder)).run()
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    return 1 if result["wrong"] else 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", nargs="?", default=ROOT / "target/release/millrace")
    parser.add_argument("--seconds", type=int, default=1800)
    parser.add_argument("--publishers", type=int, default=20)
    parser.add_argument("--viewers", type=int, default=200, help="sessions, the same number for each relay and broadcast")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--only", help="kinds of failures, with commas; all without it")
    parser.add_argument("--json", help="file for the result")
    parser.add_argument("--moq-relay", help="program of moq-relay: two of the relays run it")
    parser.add_argument("--logs", help="folder for the logs of all processes")
    return parser.parse_args()


class Cluster:
    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        options.binary = Path(options.binary).resolve()
        self.random = random.Random(options.seed)
        self.theirs = RELAYS[3:] if options.moq_relay else []
        self.ours = [name for name in RELAYS if name not in self.theirs]
        # Publishers connect to these relays; with moq-relay to one of its kind as well.
        self.origins = [*RELAYS[:2], self.theirs[0] if self.theirs else RELAYS[2]]
        self.failures = []
        self.wrong = []

    def run(self):
        say(f"seed {self.options.seed}, {self.options.publishers} publishers, {self.options.viewers} viewers, {self.options.seconds} s")
        self.prepare()
        try:
            self.use()
        finally:
            if self.options.logs:
                shutil.copytree(self.folder, self.options.logs, ignore=shutil.ignore_patterns("etc", "data-*", "pki"), dirs_exist_ok=True)
        return self.judge()

    # --- The parts ---

    def prepare(self):
        hosts.begin(self.folder, ["/etc/millrace", "/etc/etcd"])
        certificates = [ROOT / "contrib/cluster/secrets.sh", *RELAYS, *ETCD]
        # Valid since yesterday, so that a clock that is an hour behind accepts them.
        yesterday = ["faketime", "-f", "-1d"] if FAKETIME else []
        subprocess.run([*yesterday, *certificates], cwd=self.folder, check=True, capture_output=True)
        call("nft", "add table bridge cut")
        call("nft", "add chain bridge cut forward { type filter hook forward priority 0; }")
        names = [*RELAYS, *ETCD, "publishers", "viewers"]
        self.hosts = {name: Host(name, place, self.folder) for place, name in enumerate(names, 10)}
        for name in [*RELAYS, *ETCD]:
            place = self.folder / f"settings-{name}"
            place.mkdir()
            for source, target in {"ca.pem": "ca.pem", f"{name}.pem": "relay.pem", f"{name}.key": "relay.key"}.items():
                shutil.copy(self.folder / "pki" / source, place / target)
        for name in RELAYS:
            # moq-relay asks for all namespaces.
            settings = SETTINGS.replace('namespace = "live/**"', 'namespace = "**"') if self.theirs else SETTINGS
            (self.folder / f"settings-{name}/relay.toml").write_text(f'cluster-url = "moqt://{name}:4443"\n{settings}')
            self.clock(name, 0)

    def start_etcd(self, name):
        cluster = ",".join(f"{it}=https://{it}:2380" for it in ETCD)
        tls = [f"--{kind}{part}" for kind in ("", "peer-") for part in ("cert-file=/etc/etcd/relay.pem", "key-file=/etc/etcd/relay.key", "trusted-ca-file=/etc/etcd/ca.pem", "client-cert-auth")]
        urls = [f"--initial-advertise-peer-urls=https://{name}:2380", "--listen-peer-urls=https://0.0.0.0:2380", "--listen-client-urls=https://0.0.0.0:2379", f"--advertise-client-urls=https://{name}:2379"]
        command = ["etcd", f"--name={name}", f"--data-dir={self.folder}/data-{name}", f"--initial-cluster={cluster}", *urls, *tls]
        self.hosts[name].start(command, [(self.folder / f"settings-{name}", "/etc/etcd")])

    def start_relay(self, name):
        volumes = [(self.folder / f"settings-{name}", "/etc/millrace")]
        if name in self.theirs:
            tls = ["--listen-tls-cert=/etc/millrace/relay.pem", "--listen-tls-key=/etc/millrace/relay.key", "--connect-tls-root=/etc/millrace/ca.pem"]
            peers = [f"--cluster-connect=moqt://{peer}:4443" for peer in self.ours]
            command = [Path(self.options.moq_relay).resolve(), "--listen=0.0.0.0:4443", "--auth-public='**'", *tls, *peers]
            self.hosts[name].start(command, volumes)
            return
        variables = {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(self.folder / f"clock-{name}"), "FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        # Only the relay is given the library, and not the shell that starts it.
        clock = ["env", *(f"{key}={value}" for key, value in variables.items())] if FAKETIME else []
        command = [*clock, self.options.binary, "relay", "--config", "/etc/millrace/relay.toml"]
        self.hosts[name].start(command, volumes)

    def clock(self, name, seconds):
        (self.folder / f"clock-{name}").write_text(f"{seconds:+d}\n")

    def status(self, name):
        return json.loads(self.hosts[name].ask(self.options.binary, "status", "--json") or "{}")

    def until_found(self, relays, bound=hosts.BOUND):
        for name in relays:
            found = lambda: self.status(name).get("cluster", {}).get("discovery", {}).get("found")
            wait_for(f"{name} to find {len(relays) - 1} others", found, lambda it: it == len(relays) - 1, bound)

    # --- The run ---

    def use(self):
        for name in ETCD:
            self.start_etcd(name)
        for name in RELAYS:
            self.start_relay(name)
        self.until_found(self.ours)
        binary, trust = self.options.binary, ["--tls-root", self.folder / "pki/ca.pem"]
        generate = ["--generate", "--rate-hz", RATE_HZ, "--objects-per-group", RATE_HZ, "--history", f"{CACHE}s"]
        publishers, viewers = [], {}
        for number in range(self.options.publishers):
            origin = self.origins[number % len(self.origins)]
            log = self.folder / f"publisher-{number}.log"
            command = [binary, "publish", *generate, "--name", f"live/{number}", *trust, f"moqt://{origin}:4443"]
            publishers.append(self.hosts["publishers"].spawn(command, log, log))
        each = max(1, self.options.viewers // (self.options.publishers * len(RELAYS)))
        for number in range(self.options.publishers):
            for relay in RELAYS:
                series = self.folder / f"series-{number}-{relay}"
                command = [binary, "subscribe", "--name", f"live/{number}", "--json", "--series", series, "--subscribers", each, "--reconnect", *trust, f"moqt://{relay}:4443"]
                viewers[number, relay] = self.hosts["viewers"].spawn(command, f"{series}.json", f"{series}.log")
        for relay in self.ours:
            sessions = lambda: len(self.status(relay).get("sessions", []))
            wait_for(f"all viewers at {relay}", sessions, lambda count: count >= each * self.options.publishers)
        self.sleep(CALM)
        end = time.monotonic() + self.options.seconds
        kinds = self.kinds()
        bag = []
        while time.monotonic() < end:
            bag = bag or self.random.sample(kinds, len(kinds))
            self.fail(bag.pop())
            self.until_found(self.ours)
            self.look_for_loops()
            self.sleep(CALM)
        for viewer in viewers.values():
            viewer.send_signal(signal.SIGTERM)
        self.viewers = {key: viewer.wait(hosts.BOUND) for key, viewer in viewers.items()}
        for publisher in publishers:
            publisher.kill()

    def kinds(self):
        kinds = ["relay-killed", "link-cut", "split", "leader-killed", "etcd-away"]
        if FAKETIME:
            kinds.append("clock-jump")
        else:
            print("SKIP: jumps of the clock: no libfaketime: apt-get install faketime")
        return self.options.only.split(",") if self.options.only else kinds

    def sleep(self, seconds):
        time.sleep(seconds)  # exact: the length of a failure, or of the time between two

    def fail(self, kind):
        failure = {"kind": kind, "since": time.monotonic(), "killed": []}
        say(f"{kind}: {getattr(self, kind.replace('-', '_'))(failure)}")
        failure["until"] = time.monotonic()
        self.failures.append(failure)

    def relay_killed(self, failure):
        name = self.random.choice(RELAYS)
        failure["killed"] = [name]
        self.hosts[name].end()
        # The lease ends, and etcd takes some time to find that.
        self.until_found([it for it in self.ours if it != name], 3 * LEASE)
        self.start_relay(name)
        if name in self.ours:
            wait_for(f"{name} to be back", lambda: self.status(name), bool)
        return f"{name}, a moq-relay" if name in self.theirs else name

    def link_cut(self, failure):
        pair = self.random.sample(RELAYS, 2)
        self.cut([pair[0]], [pair[1]])
        return " and ".join(pair)

    def split(self, failure):
        relays = self.random.sample(RELAYS, 2)
        others = [name for name in RELAYS if name not in relays]
        self.cut([*relays, ETCD[0]], [*others, *ETCD[1:]])
        return f"{', '.join(relays)} alone"

    def cut(self, left, right):
        for one in left:
            for other in right:
                for source, target in ((one, other), (other, one)):
                    call("nft", f'add rule bridge cut forward iifname "{self.hosts[source].port}" oifname "{self.hosts[target].port}" drop')
        self.sleep(self.random.uniform(5, 20))
        call("nft", "flush chain bridge cut forward")

    def leader_killed(self, failure):
        name = wait_for("etcd's leader", self.leader, bool)
        self.hosts[name].end()
        self.sleep(10)
        self.start_etcd(name)
        return name

    def leader(self):
        for name in ETCD:
            place = self.folder / f"settings-{name}"
            keys = ["--cacert", place / "ca.pem", "--cert", place / "relay.pem", "--key", place / "relay.key"]
            answer = subprocess.run(["curl", "-sS", "--max-time", "3", *keys, "-d", "{}", f"https://{name}:2379/v3/maintenance/status"], capture_output=True, text=True)
            status = json.loads(answer.stdout or "{}")
            if status.get("leader") and status["leader"] == status["header"]["member_id"]:
                return name
        return None

    def etcd_away(self, failure):
        for name in ETCD:
            self.hosts[name].process.send_signal(signal.SIGSTOP)
        self.sleep(60)
        for name in ETCD:
            self.hosts[name].process.send_signal(signal.SIGCONT)
        return "60 s"

    def clock_jump(self, failure):
        name, hours = self.random.choice(self.ours), self.random.choice([-1, 1])
        self.clock(name, hours * 3600)
        self.sleep(20)
        self.clock(name, 0)
        return f"{name}, {hours:+d} h"

    def look_for_loops(self):
        for name in self.ours:
            text = self.hosts[name].ask(self.options.binary, "cluster", "routes", "--json")
            for namespace in json.loads(text or "{}").get("namespaces", []):
                for route in namespace["routes"]:
                    path = [hop for hop in route["path"] if hop]
                    if len(path) != len(set(path)):
                        self.wrong.append(f"{name} has a route with a hop twice: {route}")

    # --- The result ---

    def judge(self):
        zero = dict.fromkeys(["failures", "lost", "lost_at_killed_relay", "lost_behind_killed_origin", "lost_with_moq_relay"], 0)
        kinds = {kind: {**zero, "gaps": []} for kind in {it["kind"] for it in self.failures} | {"calm"}}
        for failure in self.failures:
            kinds[failure["kind"]]["failures"] += 1
        totals = {"delivered": 0, "duplicates": 0, "duplicates_with_moq_relay": 0, "corrupted": 0, "viewers": 0}
        for (number, relay), code in self.viewers.items():
            series = self.folder / f"series-{number}-{relay}"
            if code != 0:
                self.wrong.append(f"a viewer at {relay} ended with {code}: {(Path(f'{series}.log').read_text().splitlines() or [''])[-1]}")
                continue
            report = json.loads(Path(f"{series}.json").read_text())
            totals["delivered"] += report["delivered"]
            origin = self.origins[number % len(self.origins)]
            is_theirs = relay in self.theirs or origin in self.theirs
            totals["duplicates_with_moq_relay" if is_theirs else "duplicates"] += report["duplicates"]
            totals["corrupted"] += report["corrupted"]
            self.judge_viewers(series, origin, relay, kinds, totals)
        for kind, row in kinds.items():
            gaps = sorted(row.pop("gaps"))
            row["gap_s"] = {"p50": rounded(statistics.median(gaps)), "p95": rounded(gaps[int(0.95 * (len(gaps) - 1))]), "most": rounded(gaps[-1])} if gaps else None
            if lost := row["lost"] + row["lost_behind_killed_origin"] + row["lost_at_killed_relay"]:
                self.wrong.append(f"{kind}: {lost} objects that were owed did not arrive")
        if totals["corrupted"]:
            self.wrong.append(f"{totals['corrupted']} objects are damaged")
        if totals["duplicates"]:
            self.wrong.append(f"{totals['duplicates']} objects came twice")
        options = {key: getattr(self.options, key) for key in ("seconds", "publishers", "viewers", "seed")}
        return {**options, **totals, "kinds": kinds, "wrong": self.wrong}

    def judge_viewers(self, series, origin, relay, kinds, totals):
        """Counts what the viewers of one process lost, by the failure at that time."""
        viewers = {}
        with open(series) as file:
            for row in csv.DictReader(file):
                sent = int(row["sent_ns"]) / 1e9
                viewers.setdefault(row["subscriber"], []).append((int(row["sequence"]), sent, sent + int(row["latency_ns"]) / 1e9))
        last = max((arrival for objects in viewers.values() for *_, arrival in objects), default=0)
        for objects in viewers.values():
            totals["viewers"] += 1
            objects.sort()
            if last - max(arrival for *_, arrival in objects) > AFTER:
                self.wrong.append(f"a viewer of {relay} had nothing more at the end")
            for (before, sent, _), (after, _, _) in zip(objects, objects[1:]):
                for missing in range(before + 1, after):
                    failure = self.failure_at(sent + (missing - before) / RATE_HZ)
                    killed = failure["killed"] if failure else []
                    where = self.place_of_loss(relay, origin, killed)
                    kinds[failure["kind"] if failure else "calm"][where] += 1
            self.gaps(sorted(arrival for *_, arrival in objects), relay, kinds)

    def place_of_loss(self, relay, origin, killed):
        if any(it in self.theirs for it in [relay, origin, *killed]):
            return "lost_with_moq_relay"
        if relay in killed:
            return "lost_at_killed_relay"
        return "lost_behind_killed_origin" if origin in killed else "lost"

    def gaps(self, arrivals, relay, kinds):
        """Notes the longest time without an object that each failure brought this viewer."""
        longest = {}
        for before, after in zip(arrivals, arrivals[1:]):
            failure = self.failure_at(before)
            if failure and relay not in failure["killed"]:
                longest[id(failure)] = max(longest.get(id(failure), (0, ""))[0], after - before), failure["kind"]
        for gap, kind in longest.values():
            kinds[kind]["gaps"].append(gap)

    def failure_at(self, moment):
        return next((it for it in self.failures if it["since"] - BEFORE <= moment <= it["until"] + AFTER), None)


def rounded(seconds):
    return round(seconds, 2)


def show(result):
    print(f"{'failure':16} {'times':>5} {'lost':>6} {'at a killed relay':>18} {'behind a killed origin':>23} {'with moq-relay':>14}   gap, s: p50, p95, most")
    for kind, row in sorted(result["kinds"].items()):
        gap = row["gap_s"]
        shown = f"{gap['p50']}, {gap['p95']}, {gap['most']}" if gap else "-"
        print(f"{kind:16} {row['failures']:5} {row['lost']:6} {row['lost_at_killed_relay']:18} {row['lost_behind_killed_origin']:23} {row['lost_with_moq_relay']:14}   {shown}")
    print(f"{result['delivered']} objects at {result['viewers']} viewers, {result['duplicates']} twice, {result['duplicates_with_moq_relay']} twice with moq-relay, {result['corrupted']} damaged")
    for line in result["wrong"]:
        print(f"FAIL: {line}")
    print("FAIL" if result["wrong"] else "PASS")


def say(text):
    print(f"soak-cluster: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
