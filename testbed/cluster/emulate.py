"""Brings a cluster up and takes it down again, whatever happens in between."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from testbed.base.errors import RunFailed, Unavailable, UsageError
from testbed.cluster import system
from testbed.cluster.facts import RELAY_STATE, VARIABLE, Facts, write_facts
from testbed.cluster.relay import TUN, Links, relay
from testbed.cluster.spec import WAYS, Change, ClusterSpec, Mechanism, Shaper
from testbed.cluster.system import idle_polling, own_prefix, send_window_bytes, tcp_settings
from testbed.cluster.topology import CIDR, DEVICE, Node, Topology, facts_of

# MPI sends its segments over one connection per neighbour and cannot refill it while its thread
# sleeps, so that connection may hold more than others (see `send_window_bytes`), and segments up to
# a size leave without asking first: an answer would wait for a rank that is busy computing.
MPI_SEND_WINDOW_BYTES = 1 << 20
EAGER_BYTES = 1 << 20


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up.

    Attributes:
        topology: its namespaces and cables.
        folder: holds the script that enters a node, the hostfile and the facts.
        relay: the process that makes its latency; None = it has none, or the kernel makes it.
    """

    topology: Topology
    folder: Path
    relay: subprocess.Popen[bytes] | None = None

    @property
    def hostfile(self) -> Path:
        """Open MPI's hostfile with the nodes' addresses."""
        return self.folder / "hostfile"

    @property
    def enter(self) -> Path:
        """The script that runs a command on a node: `enter node2 COMMAND...`."""
        return self.folder / "enter"

    @property
    def facts_path(self) -> Path:
        """What processes inside read."""
        return self.folder / "facts.json"

    def command(self, words: Sequence[str], node: int = 1) -> list[str]:
        """A command line that runs `words` on a node, to be started from outside."""
        quoted = 'exec "$@"'
        target = self.topology.nodes[node - 1]
        host = f"mount --bind {self.folder / 'hosts'} /etc/hosts && hostname {target.host}"
        enter = [*self.topology.policy_command(target)]
        enter += ["ip", "netns", "exec", target.namespace, "unshare", "--uts"]
        return [*enter, "sh", "-c", f"{host} && {quoted}", "sh", *words]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The variables with which `mpirun` and Gloo find the nodes by themselves.

        `PRTE_MCA_*` are read by mpirun's own runtime, `OMPI_MCA_*` by the MPI library.
        """
        spec = self.topology.spec
        fastest_bps = max(spec.kernel_bps(node.number, "up") for node in self.topology.nodes)
        under_way = send_window_bytes(fastest_bps, self.topology.round_trip_s)
        shared = ",sm" if spec.ranks_per_node > 1 else ""
        return {
            **base,
            VARIABLE: str(self.facts_path),
            "TESTBED_ENTER": str(self.enter),
            "PRTE_MCA_plm_ssh_agent": str(self.enter),
            "PRTE_MCA_prte_default_hostfile": str(self.hostfile),
            "PRTE_MCA_prte_if_include": CIDR,
            "OMPI_MCA_btl": f"tcp,self{shared}",
            "OMPI_MCA_btl_tcp_if_include": CIDR,
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl_tcp_sndbuf": str(max(MPI_SEND_WINDOW_BYTES, under_way)),
            "OMPI_MCA_btl_tcp_eager_limit": str(EAGER_BYTES),
            "OMPI_MCA_mpi_yield_when_idle": "1",
            # In a user namespace this process is root, which Open MPI refuses without these.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "GLOO_SOCKET_IFNAME": DEVICE,
        }

    def apply(self, change: Change) -> None:
        """Change links now; cutting a node off takes its cable out."""
        nodes = self.topology.nodes
        for node in nodes if change.node is None else (nodes[change.node - 1],):
            self._apply_to(node, change)

    def _apply_to(self, node: Node, change: Change) -> None:
        state = "down" if change.cuts else "up"
        system.call("ip", "-n", self.topology.switch, "link", "set", node.port, state)
        if change.cuts:
            return
        for direction in WAYS if change.direction is None else (change.direction,):
            bps = change.rate_bps / self.topology.spec.dilation
            system.call(*self.topology.rate_command(node, direction, bps))


@contextlib.contextmanager
def emulated(spec: ClusterSpec, number: int = 0) -> Iterator[Cluster]:
    """A cluster, up inside the block; leftovers of owners that were killed are removed first.

    Args:
        spec: what to emulate.
        number: of the cluster; one process may have several at once.

    Raises:
        Unavailable: the kernel lacks what was asked for.
        RunFailed: a command of the system failed; says which.
    """
    system.remove_leftovers()
    prefix = own_prefix(number) + "-"
    topology = Topology(prefix, spec, cores=tuple(sorted(os.sched_getaffinity(0))))
    folder = Path(tempfile.gettempdir()) / f"{prefix}files"
    try:
        folder.mkdir(mode=0o700)
        with idle_polling(spec.awake == "auto") as awake, contextlib.ExitStack() as stack:
            yield _bring_up(topology, folder, awake, stack)
    finally:
        with _signals_blocked():
            for name in topology.namespaces:
                system.remove_namespace(name)
            shutil.rmtree(folder, ignore_errors=True)


def _bring_up(topology: Topology, folder: Path, awake: str, stack: contextlib.ExitStack) -> Cluster:
    for name in topology.namespaces:
        system.add_namespace(name)
    _check_policy(topology)
    mechanism = _choose_mechanism(topology.spec, topology.switch)
    shaper: Shaper = "htb" if system.has_htb(topology.switch) else "tbf"
    topology = replace(topology, mechanism=mechanism, shaper=shaper)
    process = None
    if mechanism == "relay":
        process = stack.enter_context(relay(_links(topology, folder), topology.switch))
    for command in topology.build():
        system.call(*command)
    settings = _set_tcp(topology)
    cluster = Cluster(topology, folder, process)
    (folder / "hosts").write_text(topology.hosts())
    cluster.hostfile.write_text(topology.hostfile())
    cluster.enter.write_text(topology.enter(str(folder / "hosts")))
    cluster.enter.chmod(0o700)
    write_facts(cluster.facts_path, facts_of(topology, cluster.hostfile, settings, awake))
    return cluster


def _links(topology: Topology, folder: Path) -> Links:
    spec, nodes = topology.spec, topology.nodes
    return Links(
        namespaces=[node.namespace for node in nodes],
        device=DEVICE,
        up_bps=[spec.kernel_bps(node.number, "up") for node in nodes],
        down_bps=[spec.kernel_bps(node.number, "down") for node in nodes],
        latency_s=spec.latency_s * spec.dilation,
        jitter_s=spec.jitter_s * spec.dilation,
        state=str(folder / RELAY_STATE),
    )


def _check_policy(topology: Topology) -> None:
    """See that nodes may have their cores and CPU policy.

    Raises:
        UsageError: cores are to be pinned and cannot be distributed evenly.
        Unavailable: no `chrt` or `taskset`, or it is not allowed.
    """
    spec = topology.spec
    if spec.cores == "pinned" and topology.node_cores is None:
        raise UsageError(
            f"cluster: cores is 'pinned', but {len(topology.cores)} cores cannot be dealt out "
            f"evenly to {spec.nodes} nodes; make it a multiple of the cores, or fewer nodes than "
            "cores, or choose cores=shared"
        )
    words = topology.policy_command(topology.nodes[0])
    refused = system.refusal(*words) if words else ""
    if refused:
        asked = f"cpu_policy={spec.cpu_policy},cores={spec.cores}"
        raise Unavailable("cluster option", asked, refused, "use cpu_policy=other,cores=shared")


def _set_tcp(topology: Topology) -> dict[str, list[str]]:
    """Give every node TCP settings for a loss-free network; what each setting is on each node."""
    for node in topology.nodes:
        bps = topology.spec.kernel_bps(node.number, "up")
        for key, value in tcp_settings(bps, topology.round_trip_s).items():
            system.set_sysctl(node.namespace, key, value)
    keys = tcp_settings(topology.spec.slowest_kernel_bps)
    return {
        key: list(dict.fromkeys(system.sysctl(n.namespace, key) for n in topology.nodes))
        for key in keys
    }


def _choose_mechanism(spec: ClusterSpec, namespace: str) -> Mechanism | None:
    """How latency and loss are made.

    Raises:
        Unavailable: neither the kernel nor a relay can make them here.
        UsageError: a relay would have to, and the cluster is not dilated enough for it.
    """
    if not spec.latency_s and not spec.loss_share:
        return None
    if spec.latency_by == "injected":
        return "injected"
    if spec.latency_by != "relay" and system.has_netem(namespace):
        return "netem"
    reason = "this kernel has no netem (module sch_netem)"
    if spec.loss_share:
        raise Unavailable("cluster option", f"loss={spec.loss}", reason, "leave out loss")
    if spec.latency_by == "netem":
        raise Unavailable("cluster option", "latency_by=netem", reason, "use latency_by=relay")
    spec.check_relayed()
    if not os.access(TUN, os.R_OK | os.W_OK):
        reason += f", and {TUN} cannot be opened, through which a relay would hold packets"
        remedy = "run as root, load the module tun, or leave out latency"
        raise Unavailable("cluster option", f"latency={spec.latency}", reason, remedy)
    return "relay"


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Signals that ask this process to end have to wait."""
    asking = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, asking)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# Carries out, at their times, the changes of links that a cluster's description asks for.


@contextlib.contextmanager
def link_changes(cluster: Cluster) -> Iterator[Callable[[], RunFailed | None]]:
    """Carries out the changes of the specification while the block runs, and notes each as done.

    Yields a function that returns the error of a change that failed: no other is tried then, and
    what is measured from there on was not measured on the cluster that was asked for.
    """
    ended = threading.Event()
    spec = cluster.topology.spec
    failures: list[RunFailed] = []

    def follow() -> None:
        passed_s = 0.0
        for change in spec.changes:
            if ended.wait((change.at_s - passed_s) * spec.dilation):
                return
            passed_s = change.at_s
            try:
                cluster.apply(change)
                _note(cluster, change)
            except Exception as error:  # any error has to fail the run
                told = f"cluster: the change of links at {change.at_s:g} s was not made: {error}"
                failures.append(RunFailed(told))
                _tell(cluster, told)
                return

    thread = threading.Thread(target=follow, name="links", daemon=True)
    thread.start()
    try:
        yield lambda: failures[0] if failures else _relay_lost(cluster)
    finally:
        ended.set()
        thread.join(system.COMMAND_S)


def _relay_lost(cluster: Cluster) -> RunFailed | None:
    if cluster.relay is None or cluster.relay.poll() is None:
        return None
    told = f"cluster: the relay that makes the latency ended with {cluster.relay.returncode}"
    _tell(cluster, told)
    return RunFailed(told)


def _tell(cluster: Cluster, failure: str) -> None:
    """Write the failure where processes that are about to write results will read it."""
    facts = msgspec.json.decode(cluster.facts_path.read_bytes(), type=Facts)
    with contextlib.suppress(OSError):  # a full disk: whoever started the command is told as well
        write_facts(cluster.facts_path, msgspec.structs.replace(facts, failure=failure))


def _note(cluster: Cluster, change: Change) -> None:
    facts = msgspec.json.decode(cluster.facts_path.read_bytes(), type=Facts)
    done = {
        "at_s": change.at_s,
        "done_unix_s": time.time(),
        "node": change.node,
        "direction": change.direction,
        "rate": change.rate,
        "kernel_bps": change.rate_bps / facts.dilation,
    }
    record = {**facts.record, "changes": [*facts.record["changes"], done]}
    write_facts(cluster.facts_path, msgspec.structs.replace(facts, record=record))
