"""Launchers' variables, Slurm's node lists, mpirun's command line: all pure."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

import pytest

from testbed.base.axes import BACKENDS
from testbed.base.errors import Disagreement, UsageError
from testbed.launch import join as launch_join
from testbed.launch import rendezvous
from testbed.launch.host import choose_address
from testbed.launch.identity import identify
from testbed.launch.mpirun import MpiLauncher, find_mpirun, mpirun_command, mpirun_environment
from testbed.launch.processes import base_environment
from testbed.launch.slurm import expand_node_list, hosts_of_ranks

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
SLURM_TASK = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
}


def test_nothing_means_alone() -> None:
    assert identify({}).launcher == "alone"


@pytest.mark.parametrize(
    ("variables", "launcher", "rank", "size"),
    [
        (OPENMPI, "openmpi", 3, 4),
        (TORCHRUN, "torchrun", 1, 2),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, "pmi", 1, 3),
        ({"PMIX_RANK": "2", "PMIX_NAMESPACE": "n"}, "pmix", 2, None),
        (SLURM_TASK, "slurm", 5, 8),
    ],
)
def test_each_launcher_is_known(
    variables: dict[str, str], launcher: str, rank: int, size: int | None
) -> None:
    found = identify(variables)
    assert (found.launcher, found.rank, found.size) == (launcher, rank, size)


def test_the_launcher_nearest_to_the_process_wins() -> None:
    assert identify(OPENMPI | SLURM_TASK).launcher == "openmpi"
    assert identify(TORCHRUN | OPENMPI | SLURM_TASK).launcher == "torchrun"


def test_a_batch_shell_is_no_task() -> None:
    shell = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    assert identify(shell).launcher == "alone"


def test_an_interactive_step_of_slurm_is_no_task_but_mpirun_in_it_counts() -> None:
    shell = SLURM_TASK | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}
    assert identify(shell).launcher == "alone"
    assert identify(shell | OPENMPI).launcher == "openmpi"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
        (OPENMPI | {"OMPI_COMM_WORLD_RANK": "4"}, "expected less"),
        (OPENMPI | {"OMPI_COMM_WORLD_RANK": "two"}, "expected a number"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "RANK, WORLD_SIZE is not"),
    ],
)
def test_incomplete_or_wrong_variables_are_named(variables: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        identify(variables)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node7", ["node7"]),
        ("a[1-3]", ["a1", "a2", "a3"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert expand_node_list(text) == names


@pytest.mark.parametrize(
    ("variables", "hosts"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1"}, ["n1", "n1", "n2"]),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_DISTRIBUTION": "cyclic:block"},
            ["n1", "n2", "n1"],
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_DISTRIBUTION": "plane"},
            ["one of n1, n2"] * 3,
        ),
        ({}, ["one of n1, n2"] * 3),
    ],
)
def test_where_slurm_s_tasks_are(variables: dict[str, str], hosts: list[str]) -> None:
    assert hosts_of_ranks({"SLURM_STEP_NODELIST": "n[1-2]"} | variables, 3) == hosts


def test_slurm_tells_the_tasks_of_a_node_also_where_pmix_does_not() -> None:
    step = SLURM_TASK | {"SLURM_STEP_TASKS_PER_NODE": "4(x1),3,1", "SLURM_NODEID": "1"}
    found = identify(step | {"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.7.0"})
    assert (found.launcher, found.rank, found.size) == ("pmix", 5, 8)
    assert (found.local_rank, found.local_size) == (1, 3)


def test_an_unknown_interface_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no interface 'wrong0' .* lo \(127\.0\.0\.1\)"):
        choose_address("wrong0", single_host=True)
    assert choose_address(None, single_host=True) == "127.0.0.1"
    assert choose_address("lo", single_host=False) == "127.0.0.1"


def test_mpirun_gets_what_containers_and_few_slots_need() -> None:
    launcher = MpiLauncher(Path("/opt/mpi/bin/mpirun"), Path("/opt/mpi/lib/libmpi.so"), True)
    environment = mpirun_environment(launcher, {"HOME": "/h"}, 64, 2)
    command = mpirun_command(launcher, 4, ["prog", "arg"], "hosts", environment)
    assert command[:5] == ["/opt/mpi/bin/mpirun", "-n", "4", "--hostfile", "hosts"]
    assert {"--oversubscribe", "--allow-run-as-root"} <= set(command)
    assert environment["MPI4PY_LIBMPI"] == "/opt/mpi/lib/libmpi.so"
    assert {"MPI4PY_LIBMPI", "OMP_NUM_THREADS"} <= set(command)
    assert command[-2:] == ["prog", "arg"]
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["OMPI_MCA_mpi_yield_when_idle"] == "1"


@pytest.mark.parametrize("launcher", [OPENMPI, SLURM_TASK])
def test_a_job_within_a_job_has_the_user_s_network_and_no_launcher(
    launcher: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"OMPI_MCA_btl_tcp_if_include": "ib0", "OMPI_MCA_btl": "tcp,self"}
    own |= {"NCCL_SOCKET_IFNAME": "ib0", "HOME": "/h"}
    internal = {"OMPI_MCA_initial_wdir": ".", "OMPI_MCA_btl_sm_backing_directory": "/dev/shm/x"}
    internal |= {"PMIX_RANK": "0", "RANK": "3"}
    monkeypatch.setattr(os, "environ", {**launcher, **own, **internal})
    found = base_environment()
    within = {"SLURM_OVERLAP": "1"} if launcher is SLURM_TASK else {}
    slurms = {name: text for name, text in launcher.items() if name.startswith("SLURM_") and within}
    slurms.pop("SLURM_STEP_ID", None)
    assert found == own | within | slurms
    assert identify(found).launcher == "alone"


def test_ranks_on_other_hosts_have_what_decides_how_they_exchange() -> None:
    launcher = MpiLauncher(Path("mpirun"), None, True)
    given = {"NCCL_SOCKET_IFNAME": "eth1", "UCX_TLS": "tcp", "CUDA_VISIBLE_DEVICES": "0"}
    command = mpirun_command(launcher, 2, ["prog"], "hosts", given)
    handed_on = [name for flag, name in itertools.pairwise(command) if flag == "-x"]
    assert handed_on == ["NCCL_SOCKET_IFNAME", "UCX_TLS"]  # GPUs have a host's own numbers


@pytest.mark.parametrize(
    ("is_open_mpi", "given", "ranks_here", "expected"),
    [
        (True, {}, 2, "^ofi"),
        (True, {"OMPI_MCA_btl": "tcp,self"}, 2, "tcp,self"),  # the user's own
        (True, {}, 0, None),  # several machines
        (False, {}, 2, None),  # no Open MPI
    ],
)
def test_open_mpi_does_without_libfabric_on_one_machine(
    is_open_mpi: bool, given: dict[str, str], ranks_here: int, expected: str | None
) -> None:
    launcher = MpiLauncher(Path("/opt/mpi/bin/mpirun"), None, is_open_mpi)
    environment = mpirun_environment(launcher, given, ranks_here, 1)
    assert environment.get("OMPI_MCA_btl") == expected


def test_a_site_s_own_mpirun_wins_when_it_is_first_on_path(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.6'\n")
    program.chmod(0o755)
    library = tmp_path / "lib" / "libmpi.so.40"
    library.parent.mkdir()
    library.touch()
    found = find_mpirun(str(program.parent))
    assert found == MpiLauncher(program, library, True)


def test_ranks_with_another_torch_do_not_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host may have another environment; a record tells of rank 0's alone."""
    versions = {"testbed": "0.1.0", "torch": "2.13.0"}
    role = launch_join.Role(identify({}), BACKENDS.resolve("gloo"), 2, 0)

    def settings(torch: str) -> str:
        monkeypatch.setattr(launch_join, "version_of", {**versions, "torch": torch}.get)
        return launch_join.settings_of(role, "fifo")

    same, other = settings("2.13.0"), settings("2.9.1")
    launch_join._agree([("a", same, 1), ("b", same, 1)])
    with pytest.raises(Disagreement, match=r"rank 1 \(host b\) .*torch=2\.9\.1 .*torch=2\.13\.0"):
        launch_join._agree([("a", same, 1), ("b", other, 1)])


@pytest.mark.parametrize(
    ("name", "own", "listens_on"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),  # a step on one node
        ("n1", "10.0.0.5", "10.0.0.5"),
        ("n1", "127.0.1.1", "0.0.0.0"),  # what Debian says of a host's own name
    ],
)
def test_rank_0_of_a_slurm_step_listens_where_others_look_for_it(
    name: str, own: str, listens_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", {name: own}.__getitem__)
    assert rendezvous._reached_as(name) == listens_on


def test_tasks_of_a_step_look_for_rank_0_on_its_first_node() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}
    for distribution in ("block", "plane"):
        given = step | {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_DISTRIBUTION": distribution}
        assert rendezvous._slurm_invitation(given, 3).host == "n1"
    assert rendezvous._slurm_invitation(step | {"SLURM_STEP_NODELIST": "n1"}, 3).host == "127.0.0.1"
