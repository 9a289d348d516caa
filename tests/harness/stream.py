"""Sends a stream from one emulated node to another and says how fast its payload arrived.

stream.py receive PORT NUM_BYTES    prints payload bits per second
stream.py send HOST PORT NUM_BYTES
"""

from __future__ import annotations

import socket
import sys
import time

CHUNK = bytes(1 << 18)


def receive(port: int, num_bytes: int) -> None:
    with socket.create_server(("", port)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection:
            warm = num_bytes // 4  # the first quarter fills buckets and windows
            left = read(connection, warm)
            begin_s = time.perf_counter()
            arrived = (left - warm) + read(connection, num_bytes - left)
            print(8 * arrived / (time.perf_counter() - begin_s), flush=True)
            while connection.recv(1 << 20):
                pass  # a sender must not find the door closed


def read(connection: socket.socket, at_least: int) -> int:
    total = 0
    while total < at_least:
        piece = connection.recv(1 << 20)
        if not piece:
            raise EOFError("the sender left early")
        total += len(piece)
    return total


def send(host: str, port: int, num_bytes: int) -> None:
    with socket.create_connection((host, port), timeout=30) as connection:
        for _ in range(-(-num_bytes // len(CHUNK)) + 1):
            connection.sendall(CHUNK)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]), int(sys.argv[3]))
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
