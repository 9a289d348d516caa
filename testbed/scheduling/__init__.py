"""Schedulers: which gradients are sent together, in which order, on which channel.

Each planner is a pure function from a trace and a link to a frozen `Plan`. Symbols in the
docstrings of this package; times in seconds, sizes in bytes:

| symbol | meaning |
|---|---|
| L, l | number of tensors; index in forward order, l = 1 nearest the input; backward runs L .. 1 |
| M_l | bytes of gradient l |
| t_f(l), t_b(l), t_f, t_b | forward and backward time of tensor l, and of the whole model |
| R_l | when gradient l is ready, counted from the start of the backward pass |
| tau_c(l) | when the message that holds gradient l starts |
| a, b, T(M) | start-up time, time per byte, T(M) = a + b M of one message alone (`Link`) |
| c_k, S_k, E_k | of message k = 1 .. K: when its last gradient is ready, its bytes, when it ends |
| q_l | tail: forward time from the first layer that reads tensor l to the end of the pass |

The examples use five tensors with R = 2, 4, 7, 10, 15 s and M = 3, 4, 1, 1, 1 B in backward order,
and a = 4 s, b = 1 s/B.
"""
