"""One rank of a contract test's job, started by a launcher with its settings as JSON.

Joins as every run does, then runs the cases that the test process sends over a local socket.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys

import msgspec
import torch

from testbed.backends.protocol import Order
from testbed.base.axes import BACKENDS
from testbed.launch.join import assign_role, join, who_am_i
from testbed.launch.lifecycle import place_device
from tests.harness.rank_agent import Agent, Leave
from tests.harness.wire import receive_object, send_object


class JobSettings(msgspec.Struct, frozen=True):
    """What the test process tells the ranks that it starts."""

    address: str
    backend: str
    num_workers: int
    order: Order
    num_channels: int
    deadline_s: float
    device: str = "cpu"


def main(text: str) -> None:
    # Whoever is ended because it hung says where.
    faulthandler.register(signal.SIGTERM, chain=True)
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)
    settings = msgspec.json.decode(text, type=JobSettings)
    backend = BACKENDS.resolve(settings.backend).usable()
    role = assign_role(who_am_i(), backend, settings.num_workers)
    group = join(
        role,
        deadline_s=settings.deadline_s,
        order=settings.order,
        num_channels=settings.num_channels,
        device=place_device(settings.device, role.identity.local_rank),
        # Dedicated servers open under the name that the group was joined with.
        name=f"{settings.order}-{settings.num_channels}",
    )
    if role.is_server:
        assert backend.facts.serve is not None
        try:
            backend.facts.serve(group, backend.options)
        finally:
            if group.control.loss is not None:
                sys.stderr.write(f"server: {group.control.loss.who} is lost\n")
        group.control.close()
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(settings.address)
        send_object(connection, group.rank)
        work(connection, Agent(role, group))
        if group.control.loss is not None:
            sys.stderr.flush()
            os._exit(0)  # a library that waits for a lost rank cannot be finalised


def work(connection: socket.socket, agent: Agent) -> None:
    """Run cases until told to leave."""
    command = None
    while not isinstance(command, Leave):
        command = receive_object(connection, None)
        send_object(connection, agent.perform(command))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
