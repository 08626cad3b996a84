"""Hosts for scripts that run a cluster on this machine: network namespaces on one bridge, with names and mounts of their own.

Call `begin` in namespaces of its own (`unshare --mount --net --pid --fork --kill-child --mount-proc`), which end with everything in them.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

BOUND = 120


def begin(folder, targets=()):
    """Makes /etc and /run copies of this script, with the files and folders `targets`, that hosts mount over."""
    assert os.getpid() == 1, "not in namespaces of its own"
    call("mount", "--make-rprivate", "/")
    shutil.copytree("/etc", folder / "etc", symlinks=True)
    call("mount", "--bind", folder / "etc", "/etc")
    for point in ("/run", "/var/lib"):
        call("mount", "-t", "tmpfs", "tmpfs", point)
    for target in map(Path, targets):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch() if target.suffix else target.mkdir()
    call("ip", "link", "set", "lo", "up")
    call("ip", "link", "add", "hosts", "type", "bridge")
    call("ip", "address", "add", "10.88.0.1/24", "dev", "hosts")
    call("ip", "link", "set", "hosts", "up")


class Host:
    """A host with one address, and at most one process that it is for."""

    def __init__(self, name, place, folder):
        self.name, self.folder = name, folder
        self.address = f"10.88.0.{place}"
        self.port = f"to-{name}"
        self.process = None
        call("ip", "netns", "add", name)
        call("ip", "link", "add", self.port, "type", "veth", "peer", "name", "eth0", "netns", name)
        call("ip", "link", "set", self.port, "master", "hosts", "up")
        call("ip", "-n", name, "address", "add", f"{self.address}/24", "dev", "eth0")
        call("ip", "-n", name, "link", "set", "eth0", "up")
        call("ip", "-n", name, "link", "set", "lo", "up")
        with open("/etc/hosts", "a") as hosts:
            hosts.write(f"{self.address} {name}\n")

    def start(self, command, volumes=(), variables=None):
        """Starts the host's process. `volumes` are pairs of a path here and the place where the process has it."""
        mounts = ["mount -t tmpfs tmpfs /run", "mkdir /run/millrace", *(f"mount --bind {source} {target}" for source, target in volumes)]
        steps = " && ".join([*mounts, "exec " + " ".join(map(str, command))])
        self.process = self.spawn(["unshare", "--mount", "sh", "-c", steps], self.log, self.log, variables)

    @property
    def log(self):
        return self.folder / f"{self.name}.log"

    def spawn(self, command, output, errors, variables=None):
        """Starts any process on this host, with its output in files."""
        with open(output, "ab") as out, open(errors, "ab") as err:
            inside = ["nsenter", f"--net=/run/netns/{self.name}", *map(str, command)]
            return subprocess.Popen(inside, stdout=out, stderr=err, env={**os.environ, **(variables or {})})

    def ask(self, *command):
        """Runs a command beside the host's process, and returns what it prints; nothing if it fails."""
        inside = ["nsenter", f"--target={self.process.pid}", "--net", "--mount", *map(str, command)]
        done = subprocess.run(inside, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    def end(self, how=signal.SIGKILL):
        self.process.send_signal(how)
        return self.process.wait(BOUND)

    def is_running(self):
        return self.process is not None and self.process.poll() is None


def call(*command):
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


def wait_for(what, read, wanted, bound=BOUND):
    """Reads a state until it is as wanted, and returns it."""
    deadline = time.monotonic() + bound
    while not wanted(seen := read()):
        assert time.monotonic() < deadline, f"waited in vain for {what}; last seen: {seen}"
        time.sleep(0.1)  # exact: the pause of this helper, which waits for a state
    return seen
