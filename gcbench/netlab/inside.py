"""The inside of a lab: one measurement in private namespaces, run as a script.

`gcbench.netlab.launcher` starts this script as process 1 of new network, mount and PID namespaces.
It builds the network, checks the link, runs torchrun once per node, and prints one JSON object.
When it ends, for whatever reason, the kernel kills all processes of the PID namespace and destroys
the interfaces. Nothing has to be removed, and labs cannot collide.

The script imports only the standard library: it must start in a fraction of a second.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SUBNET = "10.77.0"
PORT = 29500
CHECK_PORT = 29400
CHECK_SECONDS = 1.0
PINGS = 20
LEAST_BURST = 32 * 1024
"""Smallest burst in bytes that a shaped link may send at once."""
BURST_SECONDS = 0.0005
QUEUE = "200ms"
"""How long a packet may wait in the queue of a shaped link before it is dropped."""
_SET_NETWORK = 0x40000000  # CLONE_NEWNET


class LabError(Exception):
    """The lab cannot be built, or its job failed."""


def call(*command: str) -> str:
    """Run a command and return its output.

    Raises:
        LabError: it failed; the message has the command and the end of its error output.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
    return done.stdout


def address(node: int) -> str:
    """Return the IP address of a node."""
    return f"{SUBNET}.{node + 1}"


def namespace(node: int) -> str:
    """Return the file of a node's network namespace."""
    return f"/run/netns/node{node}"


def build(nodes: int) -> None:
    """Connect one network namespace per node to a bridge."""
    call("mount", "-t", "tmpfs", "tmpfs", "/run")  # where `ip netns` keeps its files
    call("ip", "link", "set", "lo", "up")
    call("ip", "link", "add", "switch", "type", "bridge")
    call("ip", "link", "set", "switch", "up")
    for node in range(nodes):
        name, port = f"node{node}", f"port{node}"
        call("ip", "netns", "add", name)
        call("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        call("ip", "link", "set", port, "master", "switch", "up")
        call("ip", "-n", name, "addr", "add", f"{address(node)}/24", "dev", "eth0")
        call("ip", "-n", name, "link", "set", "eth0", "up")
        call("ip", "-n", name, "link", "set", "lo", "up")


def shape(node: int, rate: float | None, delay: float, loss: float) -> None:
    """Limit a node's link in both directions; delay and drop packets that leave the node.

    Raises:
        LabError: the kernel lacks a queueing discipline.
    """
    enter = ("nsenter", f"--net={namespace(node)}")
    parent: tuple[str, ...] = ("root",)
    if delay or loss:
        netem = ("netem", "limit", "100000", "delay", f"{delay * 1e6:.0f}us", "loss", f"{loss:%}")
        try:
            call(*enter, "tc", "qdisc", "add", "dev", "eth0", "root", "handle", "1:", *netem)
        except LabError as error:
            raise LabError(
                "this kernel cannot delay or drop packets: it has no netem. "
                f"Load the module sch_netem, or use --delay 0 --loss 0 ({error})"
            ) from None
        parent = ("parent", "1:1")
    if rate is None:
        return
    burst = max(LEAST_BURST, round(rate / 8 * BURST_SECONDS))
    limit = ("tbf", "rate", f"{rate:.0f}bit", "burst", str(burst), "latency", QUEUE)
    call(*enter, "tc", "qdisc", "add", "dev", "eth0", *parent, *limit)
    call("tc", "qdisc", "add", "dev", f"port{node}", "root", *limit)


def in_namespace(node: int, function: Callable[[], None]) -> threading.Thread:
    """Run a function in a thread whose sockets belong to a node, and return the thread."""
    libc = ctypes.CDLL(None, use_errno=True)

    def run() -> None:
        descriptor = os.open(namespace(node), os.O_RDONLY)
        try:
            if libc.setns(descriptor, _SET_NETWORK):  # of this thread alone
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(descriptor)
        function()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def check_link() -> dict[str, float]:
    """Send from node 1 to node 0: return achieved bits per second and the round-trip time."""
    ready, result = threading.Event(), dict[str, float]()

    def receive() -> None:
        with socket.create_server((address(0), CHECK_PORT)) as server:
            ready.set()
            connection, _ = server.accept()
            with connection:
                for _ in range(PINGS):
                    connection.sendall(connection.recv(1))
                received, begin = 0, None
                while chunk := connection.recv(1 << 20):
                    if begin is None:  # the first burst passes unlimited
                        begin = time.perf_counter()
                        continue
                    received += len(chunk)
                    seconds = time.perf_counter() - begin
                if begin is not None and received:
                    result["bits_per_second"] = 8 * received / seconds

    def send() -> None:
        with socket.create_connection((address(0), CHECK_PORT), timeout=30) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(PINGS):
                begin = time.perf_counter()
                connection.sendall(b".")
                connection.recv(1)
                times.append(time.perf_counter() - begin)
            result["round_trip"] = sorted(times)[PINGS // 2]
            end = time.perf_counter() + CHECK_SECONDS
            while time.perf_counter() < end:
                connection.sendall(bytes(1 << 16))

    receiver = in_namespace(0, receive)
    ready.wait(10)
    sender = in_namespace(1, send)
    for thread in (sender, receiver):
        thread.join(60)
    if len(result) != 2:
        raise LabError("the nodes of the lab cannot reach each other")
    return result


def sent_bytes(nodes: int) -> list[int]:
    """Return how many bytes each node's interface has sent, headers included."""
    counts = []
    for node in range(nodes):
        text = call("ip", "-n", f"node{node}", "-s", "-j", "link", "show", "eth0")
        counts.append(json.loads(text)[0]["stats64"]["tx"]["bytes"])
    return counts


def _reason(nodes: int) -> str:
    """Return gcbench's own error lines from the nodes' logs, or the end of node 0's log."""
    texts = [Path(f"/run/log{node}").read_text(errors="replace") for node in range(nodes)]
    errors = [line for text in texts for line in text.splitlines() if line.startswith("gcbench: ")]
    return "; ".join(dict.fromkeys(errors)) or texts[0][-1000:].strip()


def train(job: dict[str, Any]) -> str:
    """Run torchrun on each node and return what worker 0 printed on stdout.

    Raises:
        LabError: a node failed; the message has the end of its error output.
    """
    nodes, workers = job["nodes"], job["workers_per_node"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    agents = []
    for node in range(nodes):
        place = {
            "nnodes": nodes,
            "nproc-per-node": workers,
            "node-rank": node,
            "master-addr": address(0),
            "master-port": PORT,
            "log-dir": "/run/torchrun",  # private, and gone with the lab
        }
        command = ["nsenter", f"--net={namespace(node)}", sys.executable, "-m"]
        command += ["torch.distributed.run", *(f"--{key}={value}" for key, value in place.items())]
        log = open(f"/run/log{node}", "w")  # noqa: SIM115 - the agent writes to it
        agents.append(
            subprocess.Popen(
                [*command, "-m", "gcbench", *job["arguments"]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if node == 0 else log,
                stderr=log,
                env=environment,
                text=True,
            )
        )
    output, _ = agents[0].communicate()
    codes = [agent.wait() for agent in agents]
    if any(codes):
        node = next(node for node, code in enumerate(codes) if code)
        raise LabError(f"node {node} exited with code {codes[node]}: {_reason(nodes)}")
    return str(output)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Build the lab, check the link, train; return the record of one measurement."""
    build(job["nodes"])
    for node in range(job["nodes"]):
        shape(node, job["bits_per_second"], job["delay"], job["loss"])
    link = check_link()
    before = sent_bytes(job["nodes"])
    text = train(job)
    after = sent_bytes(job["nodes"])
    sent = [end - begin for begin, end in zip(before, after, strict=True)]
    return {"link": link, "sent": sent, "summary": json.loads(text)}


def _end_with_launcher() -> None:
    """End this process, and with it the whole lab, when the launcher closes its end of stdin."""
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    """Measure the job in the first argument; print its record, or the reason it failed."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    try:
        record = measure(json.loads(sys.argv[1]))
    except (LabError, OSError, ValueError) as error:
        record = {"error": str(error)}
    print(json.dumps(record), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
