"""What a cell makes of what it occupies: samples a second per machine, per core and per link."""

from __future__ import annotations

from typing import Final

from testbed.base.axes import BACKENDS
from testbed.records.cell import Cell
from testbed.records.report import ReportCell, Resources

EVERY: Final = "every machine's"


def resources_of(cell: ReportCell) -> Resources | None:
    """What a cell occupied and made of it; None of a cell that failed.

        per machine = samples/s / machines,   per core = samples/s / cores,
        per link = samples/s / links,         samples per busiest GB = samples of a step / bytes

    A process counts as many cores as it has threads for tensors, a server one. Each of several
    machines has one link, full duplex; on one machine there is none. Bytes of the busiest link
    are those that were counted, of the larger direction, where each rank has a machine of its own.

    Args:
        cell: with times in the emulated cluster's own seconds, as reports have them.

    Reference:
        Jiang et al., 2020, OSDI (BytePS: what servers on machines of their own buy). Departs: all
        machines count alike, with a GPU or without.
    """
    if cell.samples_per_s is None or not cell.num_processes:
        return None
    machines, cores = cell.num_machines, _cores(cell)
    links = machines if machines > 1 else None
    moved = max(cell.wire_bytes_per_step or 0.0, cell.received_bytes_per_step or 0.0)
    apart = links is not None and machines >= cell.num_workers + cell.num_servers
    busiest_bytes = moved if apart and moved else None
    per_step = cell.num_workers * cell.batch_size
    return Resources(
        machines=machines,
        cores=cores,
        links=links or 0,
        samples_per_s_per_machine=cell.samples_per_s / machines,
        samples_per_s_per_core=cell.samples_per_s / cores,
        samples_per_s_per_link=None if links is None else cell.samples_per_s / links,
        busiest_link=_busiest(cell) if busiest_bytes else "",
        busiest_link_bytes_per_step=busiest_bytes,
        samples_per_busiest_gb=None if busiest_bytes is None else 1e9 * per_step / busiest_bytes,
    )


def _cores(cell: Cell) -> int:
    threads = cell.config.threads or cell.environment.get("torch_threads") or 1
    return cell.num_workers * int(threads) + cell.num_processes - cell.num_workers


def _busiest(cell: Cell) -> str:
    backend = BACKENDS.find(cell.backend)
    named = None if backend is None else backend.facts.busiest_link
    return EVERY if named is None else named(cell.num_workers)
