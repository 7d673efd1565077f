"""Two "nodes" on one machine: network namespaces joined by a bridge, or, without root, two torchrun agents on loopback.

In a namespace a node has an address and an interface of its own and nothing else, so that what assumes one machine
(127.0.0.1, the host's name, /proc of a peer) fails as it would between machines. They share the disk, as nodes do.
"""

import contextlib
import os
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.processes import free_port
from helpers.ranks import ROOT
from helpers.torchrun import ForkedTorchrun


@dataclass(frozen=True)
class Node:
    number: int
    address: str
    interface: str
    namespace: str = ""
    """"" where it has none of its own."""

    def cut_off(self) -> None:
        """Pull the network cable. Namespaces only."""
        ip("-n", self.namespace, "link", "set", self.interface, "down")

    def joined_again(self) -> None:
        ip("-n", self.namespace, "link", "set", self.interface, "up")


@dataclass(frozen=True)
class Cluster:
    nodes: list[Node]
    head: str
    """An address that all nodes reach, and this process too."""
    rdzv_port: int
    in_namespaces: bool

    def launch(self, script: str | Path, *args: str, max_restarts: int = 0) -> list[ForkedTorchrun]:
        """torchrun on both nodes, a rank each; their outputs are separate."""
        run_id, first = uuid.uuid4().hex, self.nodes[0]
        processes = []
        for node in self.nodes:
            options = [
                "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_id={run_id}",
                f"--rdzv_endpoint={first.address}:{self.rdzv_port}", f"--rdzv_conf=is_host={int(node is first)}",
                f"--local_addr={node.address}", f"--max_restarts={max_restarts}",
            ]  # fmt: skip
            env, command = {"GLOO_SOCKET_IFNAME": node.interface}, (str(ROOT / script), *args)
            processes.append(ForkedTorchrun(*command, options=options, env=env, namespace=node.namespace))
        return processes


@contextlib.contextmanager
def two_nodes() -> Iterator[Cluster]:
    if not may_make_namespaces():
        nodes = [Node(n, "127.0.0.1", "lo") for n in (0, 1)]
        yield Cluster(nodes, "127.0.0.1", free_port(), in_namespaces=False)
        return
    # Names and net are this process's own (an interface's name has at most 15 characters), so that runs do not meet.
    tag, net = f"{os.getpid() % 10**7}", f"10.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}"
    bridge, nodes = f"arpo{tag}", []
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{net}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for n in (0, 1):
            name, outside, inside = f"arpo{tag}n{n}", f"arpo{tag}v{n}", f"eth{tag}"
            ip("netns", "add", name)
            nodes.append(Node(n, f"{net}.{n + 1}", inside, name))
            ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
            ip("link", "set", outside, "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{net}.{n + 1}/24", "dev", inside)
            for link in (inside, "lo"):
                ip("-n", name, "link", "set", link, "up")
        yield Cluster(nodes, f"{net}.254", free_port(), in_namespaces=True)
    finally:
        for n in range(len(nodes)):
            ip("netns", "del", f"arpo{tag}n{n}")
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def may_make_namespaces() -> bool:
    """Root outside a container that forbids it."""
    probe = f"arpo{os.getpid() % 10**7}p"
    try:
        for command in (("netns", "add", probe), ("netns", "del", probe)):
            ip(*command)
        for command in (("link", "add", probe, "type", "bridge"), ("link", "del", probe)):
            ip(*command)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return False
    return True


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)
