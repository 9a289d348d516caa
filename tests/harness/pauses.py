"""Times messages after pauses between two emulated nodes: whether a shaper lets some through free.

pauses.py answer PORT                         says `listening`, then answers each with a byte
pauses.py measure HOST PORT REPEATS SIZE,...  prints {size: least seconds until the answer}
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time

HEAD = struct.Struct("!I")
PAUSE_S = 0.02  # buckets fill meanwhile


def read(connection: socket.socket, num_bytes: int) -> bytes:
    data = connection.recv(num_bytes, socket.MSG_WAITALL)
    if len(data) < num_bytes:
        raise EOFError("the other side left early")
    return data


def answer(port: int) -> None:
    with socket.create_server(("", port)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while num_bytes := HEAD.unpack(read(connection, HEAD.size))[0]:
                read(connection, num_bytes)
                connection.sendall(b"!")


def measure(host: str, port: int, repeats: int, sizes: list[int]) -> dict[int, float]:
    least_s = dict.fromkeys(sizes, float("inf"))
    with socket.create_connection((host, port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(repeats):
            for size in sizes:
                time.sleep(PAUSE_S)
                begin_s = time.perf_counter()
                connection.sendall(HEAD.pack(size) + bytes(size))
                read(connection, 1)
                least_s[size] = min(least_s[size], time.perf_counter() - begin_s)
        connection.sendall(HEAD.pack(0))
    return least_s


if __name__ == "__main__":
    if sys.argv[1] == "answer":
        answer(int(sys.argv[2]))
    else:
        asked = (sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        print(json.dumps(measure(*asked, [int(size) for size in sys.argv[5].split(",")])))
