"""Which cores a node has, what is refused, and how many threads a rank gets there."""

from itertools import pairwise

import pytest

from testbed.base.errors import UsageError
from testbed.cluster.facts import Facts
from testbed.cluster.spec import parse_cluster
from testbed.cluster.topology import Topology, pin_cores
from testbed.launch.host import check_threads, own_threads, threads_of


@pytest.mark.parametrize("num_nodes", range(1, 9))
@pytest.mark.parametrize("num_cores", range(1, 9))
def test_nodes_have_equally_many_cores_or_none_of_their_own(num_nodes, num_cores):
    cores = range(10, 10 + num_cores)
    nodes = pin_cores(num_nodes, cores)
    if nodes is None:
        assert num_nodes > num_cores
        assert num_nodes % num_cores
        return
    assert len(nodes) == num_nodes
    assert {core for node in nodes for core in node} <= set(cores)
    assert len({len(node) for node in nodes}) == 1
    sharers = [sum(core in node for node in nodes) for core in cores]
    assert len({count for count in sharers if count}) == 1
    if num_nodes >= num_cores > 1:
        assert all(node != after for node, after in pairwise(nodes))


@pytest.mark.parametrize(("spec", "pinned"), [("", True), (",cores=shared", False)])
def test_a_node_is_entered_with_its_cores_and_policy(spec, pinned):
    topology = Topology("p-", parse_cluster("nodes=4" + spec), cores=(2, 5))
    words = [" ".join(topology.policy_command(node)) for node in topology.nodes]
    pins = ["taskset -c 2 ", "taskset -c 5 "] * 2 if pinned else [""] * 4
    assert words == [f"{pin}chrt --batch 0" for pin in pins]
    script = topology.enter("/hosts")
    assert all(f"policy='{line}'" in script for line in words)


def facts(cores: str) -> Facts:
    record = {"cores": cores, "ranks_per_node": 2}
    return Facts(spec="", dilation=1.0, places=8, hostfile="", record=record)


def test_ranks_share_the_cores_of_their_node():
    assert threads_of(8, facts("pinned"), cores=4) == 2
    assert threads_of(8, facts("shared"), cores=16) == 2
    assert threads_of(8, facts("pinned"), cores=1) == 1
    assert own_threads(2, facts("pinned")) == threads_of(8, facts("pinned"))


def test_more_threads_than_cores_are_refused():
    check_threads(None)
    check_threads(2, cores=2)
    with pytest.raises(UsageError, match="--threads is 3 for each rank, and this machine has 2"):
        check_threads(3, cores=2)
