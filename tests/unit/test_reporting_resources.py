"""Throughput over machines, cores and links, and whose link is the busiest."""

import pytest

from testbed.base.config import RunConfig
from testbed.records.report import ReportCell
from testbed.reporting.columns import columns_for
from testbed.reporting.resources import resources_of
from testbed.reporting.work import undilated


def cell(backend, workers=4, servers=0, machines=None, **more):
    values = {
        "num_processes": workers + servers,
        "num_machines": workers + servers if machines is None else machines,
        "batch_size": 32,
        "samples_per_s": 1200.0,
        "wire_bytes_per_step": 3e8,
        "received_bytes_per_step": 4e8,
        "config": RunConfig(backend=backend, workers=workers, threads=1),
    }
    return ReportCell(
        backend=backend, workload="w", num_workers=workers, num_servers=servers, **(values | more)
    )


def test_servers_on_machines_of_their_own_count():
    found = resources_of(cell("zmq-ps:servers=dedicated:2", servers=2))
    assert (found.machines, found.cores, found.links) == (6, 6, 6)
    assert found.samples_per_s_per_machine == 200
    assert found.samples_per_s_per_core == 200
    assert found.samples_per_s_per_link == 200
    assert found.busiest_link == "each server's"
    assert found.busiest_link_bytes_per_step == 4e8
    assert found.samples_per_busiest_gb == pytest.approx(4 * 32 / 0.4)


def test_colocated_servers_take_cores_and_no_machines():
    beside = cell("zmq-ps", machines=4, num_processes=8)
    found = resources_of(beside)
    assert (found.machines, found.cores) == (4, 8)
    threads = RunConfig(backend="zmq-ps", workers=4, threads=3)
    assert resources_of(cell("zmq-ps", machines=4, num_processes=8, config=threads)).cores == 16


@pytest.mark.parametrize(
    ("backend", "servers", "words"),
    [
        ("mpi-ring", 0, "every machine's"),
        ("zmq-ps", 0, "every machine's"),
        ("zmq-ps:servers=colocated:2", 0, "each machine's with a server"),
        ("zmq-ps:servers=dedicated:1", 1, "each server's"),
        ("zmq-ps:servers=dedicated:4", 4, "every machine's"),
        ("zmq-ps:servers=dedicated:8", 8, "each worker's"),
        ("of-another-machine", 0, "every machine's"),
    ],
)
def test_the_busiest_link_is_named_by_the_backend(backend, servers, words):
    assert resources_of(cell(backend, servers=servers)).busiest_link == words


def test_no_link_is_named_where_ranks_share_machines_or_there_is_one():
    alone = resources_of(cell("mpi-ring", machines=1))
    assert (alone.links, alone.samples_per_s_per_link, alone.busiest_link) == (0, None, "")
    shared = resources_of(cell("mpi-ring", machines=2))
    assert shared.samples_per_s_per_link == 600
    assert shared.busiest_link_bytes_per_step is None
    assert resources_of(cell("mpi-ring", samples_per_s=None, status="failed")) is None


def test_a_dilated_cell_is_shown_in_its_cluster_s_time():
    real = cell("mpi-ring", dilation=10.0, step_time_s=1.0)
    assert undilated(real).resources.samples_per_s_per_machine == 3000
    columns = {c.key: c for c in columns_for([undilated(real)])}
    assert columns["samples_per_s_per_machine"].value(undilated(real)) == 3000
    assert columns["busiest_link"].text(undilated(real)) == "every machine's"
