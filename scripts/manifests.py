#!/usr/bin/env python3
"""Checks contrib/cluster/compose.yaml, and the settings in contrib/kubernetes. scripts/manifests.sh calls it.

    scripts/manifests.py schema FILE       the compose file keeps to this schema
    scripts/manifests.py settings BINARY   the settings in ConfigMaps are accepted by the commands that read them
    scripts/manifests.py run BINARY        starts what compose.yaml describes, each service in a network namespace of its own, and uses it.
                                           Call it in namespaces of its own (mounts, network, processes): it leaves its processes to their end
"""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jsonschema
import yaml

import hosts
from hosts import BOUND, wait_for

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = ROOT / "contrib/cluster"


def main():
    return {"schema": schema, "settings": settings, "run": run}[sys.argv[1]](Path(sys.argv[2]).resolve())


def compose():
    return yaml.safe_load((CLUSTER / "compose.yaml").read_text())


def schema(file):
    rules = json.loads(file.read_text())
    jsonschema.validate(compose(), rules)
    wrong = compose()
    wrong["services"]["edge-1"]["comand"] = []
    assert not jsonschema.Draft202012Validator(rules).is_valid(wrong), "the schema accepts a key that does not exist"
    say("compose.yaml keeps to the schema")


# --- Settings in ConfigMaps ---


def settings(binary):
    checked = 0
    for manifest in sorted((ROOT / "contrib/kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(manifest.read_text()):
            for name, text in document.get("data", {}).items() if document["kind"] == "ConfigMap" else ():
                if name.endswith(".toml"):
                    checked += 1
                    check(binary, document["metadata"]["name"], text)
    assert checked >= 2, f"only {checked} settings in the manifests"
    say(f"{checked} settings of the manifests are accepted")


def check(binary, name, text):
    """Has a command read settings. Files that they name, such as secrets, are made in a folder of this check."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        subprocess.run([CLUSTER / "secrets.sh"], cwd=folder, check=True, capture_output=True)
        subprocess.run([binary, "graft", "key", "--new", folder / "pki/host.key"], check=True, capture_output=True)
        for path, made in {
            "/etc/millrace-tls/tls.crt": "origin-1.pem",
            "/etc/millrace-tls/tls.key": "origin-1.key",
            "/etc/millrace-tls/ca.crt": "ca.pem",
            "/etc/millrace-tokens/publisher.pub": "publisher.pub",
            "/etc/millrace-key/host.key": "host.key",
        }.items():
            text = text.replace(path, str(folder / "pki" / made))
        # What `millrace graft key` prints at a peer.
        text = text.replace("0" * 64, "ab" * 32)
        file = folder / "settings.toml"
        file.write_text(text)
        command = {"millrace-relay": ["relay"], "millrace-graft": ["graft", "run"]}[name]
        done = subprocess.run([binary, *command, "--config", file, "--check"], capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"


# --- The cluster in namespaces ---


def run(binary):
    with tempfile.TemporaryDirectory() as folder:
        services = prepare(Path(folder), binary)
        try:
            use(binary, Path(folder), services)
        except BaseException:
            for service in services.values():
                print(f"---- {service.name}\n" + "\n".join(service.log.read_text(errors="replace").splitlines()[-25:]), file=sys.stderr)
            raise
        finally:
            for service in filter(hosts.Host.is_running, services.values()):
                service.end()
    say("the cluster of compose.yaml serves, and outlives an etcd member and a relay")


class Service(hosts.Host):
    """A service of the compose file."""

    def __init__(self, name, place, folder, entry, binary):
        super().__init__(name, place, folder)
        command = entry["command"]
        self.command = command if command[0] == "etcd" else [binary, *command]
        self.volumes = [self.volume(*volume.split(":")[:2]) for volume in entry["volumes"]]

    def volume(self, source, target):
        # A named volume is a folder, and is there again after a restart.
        source = self.folder / source
        if not source.exists():
            source.mkdir()
        return source, target

    def begin(self):
        self.start(self.command, self.volumes)


def prepare(folder, binary):
    entries = compose()["services"]
    hosts.begin(folder, {volume.split(":")[1] for entry in entries.values() for volume in entry["volumes"]})
    subprocess.run([CLUSTER / "secrets.sh"], cwd=folder, check=True)
    shutil.copy(CLUSTER / "relay.toml", folder)
    return {name: Service(name, place, folder, entry, binary) for place, (name, entry) in enumerate(entries.items(), 10)}


def use(binary, folder, services):
    for service in services.values():
        service.begin()
    relays = [service for name, service in services.items() if not name.startswith("etcd")]
    for relay in relays:
        wait_for(f"{relay.name} to find the four others", lambda: discovery(binary, relay), lambda found: (found.get("found"), found.get("registered")) == (4, True))
    make = [binary, "token", "make", "--key", folder / "pki/publisher.key", "--put", "live"]
    token = subprocess.run(make, capture_output=True, text=True, check=True).stdout.strip()
    trust = ["--tls-root", folder / "pki/ca.pem"]
    log = open(folder / "publisher.log", "wb")
    generate = ["publish", "--generate", "--rate-hz", "50", "--name", "live/demo"]
    publisher = subprocess.Popen([binary, *generate, *trust, f"moqt://origin-1:4443/?jwt={token}"], stdout=log, stderr=log)
    watch = lambda edge: viewer(binary, trust, edge)
    # origin-2 has connected to origin-1, and edges were connected to: routes are learned either way.
    for relay in ("origin-2", "edge-1", "edge-2", "edge-3"):
        watch(relay)
    refused = subprocess.run([binary, *generate, *trust, "--reconnect=false", "moqt://origin-2:4443"], capture_output=True, text=True, timeout=BOUND)
    assert refused.returncode != 0, "a publisher without a token was not refused"

    # Two members of three still answer, and a relay that is killed comes back under its name.
    services["etcd-1"].end()
    services["edge-2"].end()
    services["edge-2"].begin()
    wait_for("edge-2 to be back", lambda: discovery(binary, services["edge-2"]), lambda found: (found.get("found"), found.get("registered")) == (4, True))
    watch("edge-2")
    # A relay that is told to end leaves the store at once, and ends well.
    assert services["edge-3"].end(signal.SIGTERM) == 0, "edge-3 did not end well"
    wait_for("edge-3 to be forgotten", lambda: discovery(binary, services["edge-1"]), lambda found: found.get("found") == 3)
    watch("edge-1")
    publisher.send_signal(signal.SIGTERM)
    assert publisher.wait(BOUND) == 0, (folder / "publisher.log").read_text()


def discovery(binary, relay):
    """Returns what a relay's status says of the store; nothing while the relay does not answer."""
    return json.loads(relay.ask(binary, "status", "--json") or "{}").get("cluster", {}).get("discovery", {})


def viewer(binary, trust, edge):
    command = [binary, "subscribe", "--name", "live/demo", "--reconnect", "--count", "100", "--json", *trust, f"moqt://{edge}:4443"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND)
    assert done.returncode == 0, f"{edge}: {done.stderr}"
    report = json.loads(done.stdout)
    # Further objects may arrive before the command has ended.
    assert report["delivered"] >= 100 and (report["lost"], report["duplicates"]) == (0, 0), f"{edge}: {report}"
    say(f"{edge} has what was published at origin-1")


def say(text):
    print(f"manifests: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
