"""The papers' rules written down once more, from their formulas and from nothing of the project.

Layers are numbered 1 .. L from the input, as in the papers; backward runs L .. 1. `t_b[l]` seconds
of backward, `m[l]` bytes of gradient, `a` and `b` the cost a + b M of a message; index 0 is unused.
Every function gives groups in backward order, each a list of layers, and when each starts and ends.
"""

from dataclasses import dataclass

Groups = list[list[int]]


@dataclass
class Layers:
    t_b: list[float]
    m: list[float]
    a: float
    b: float

    @property
    def count(self) -> int:
        return len(self.m) - 1

    def cost(self, num_bytes: float) -> float:
        return self.a + self.b * num_bytes if num_bytes > 0 else 0.0

    def ready(self) -> list[float]:
        """R_l = tau_b(l) + t_b(l); tau_b(L) = 0, tau_b(l) = tau_b(l + 1) + t_b(l + 1)."""
        ready = [0.0] * (self.count + 1)
        tau_b = 0.0
        for layer in range(self.count, 0, -1):
            ready[layer] = tau_b + self.t_b[layer]
            tau_b = ready[layer]
        return ready


def starts(layers: Layers, m: list[float], merged: list[bool]) -> list[float]:
    """tau_c(L) = R_L; tau_c(l) = max(tau_c(l + 1) + t_c(l + 1), R_l); t_c of a merged one is 0."""
    ready = layers.ready()
    tau_c = [0.0] * (layers.count + 1)
    for layer in range(layers.count, 0, -1):
        before = 0.0
        if layer < layers.count:
            before = tau_c[layer + 1] + (0.0 if merged[layer + 1] else layers.cost(m[layer + 1]))
        tau_c[layer] = max(before, ready[layer])
    return tau_c


def merge(layers: Layers, joins) -> Groups:
    """For l = L down to 2: merge l into l - 1 where `joins(R_{l-1}, tau_c(l))`, then start over."""
    ready, m = layers.ready(), list(layers.m)
    merged = [False] * (layers.count + 1)
    groups: Groups = [[]]
    for layer in range(layers.count, 0, -1):
        groups[-1].append(layer)
        if layer == 1:
            break
        if joins(ready[layer - 1], starts(layers, m, merged)[layer]):
            merged[layer] = True
            m[layer - 1] += m[layer]
            m[layer] = 0.0
        else:
            groups.append([])
    return groups


def wfbp(layers: Layers) -> Groups:
    return [[layer] for layer in range(layers.count, 0, -1)]


def sequential(layers: Layers) -> Groups:
    return [list(range(layers.count, 0, -1))]


def mg_wfbp(layers: Layers) -> Groups:
    return merge(layers, lambda ready, tau_c: ready - tau_c < layers.a)


def asc_wfbp(layers: Layers) -> Groups:
    return merge(layers, lambda ready, tau_c: ready < tau_c)


def bucket(layers: Layers, limit: float, first_limit: float) -> Groups:
    """Add the layer, then close at the limit."""
    groups: Groups = []
    pending: list[int] = []
    size = 0.0  # of what is pending: whole bytes, so that sums are exact
    for layer in range(layers.count, 0, -1):
        pending.append(layer)
        size += layers.m[layer]
        if size >= (limit if groups else first_limit):
            groups.append(pending)
            pending, size = [], 0.0
    return groups + ([pending] if pending else [])


def osf_end(layers: Layers) -> float:
    """The earliest end over all constant buffers."""
    sizes = [layers.m[layer] for layer in range(layers.count, 0, -1)]
    candidates = {0.0, *sizes} | {sum(sizes[:k]) for k in range(1, len(sizes) + 1)}
    return min(serial(layers, bucket(layers, c, c))[-1][1] for c in candidates)


def exact_end(layers: Layers) -> float:
    """E[j] = min over i < j of max(E[i], R_j) + T(Q_j - Q_i), by position in backward order."""
    ready = layers.ready()[:0:-1]
    sizes = layers.m[:0:-1]
    ends = [0.0]
    for j in range(1, layers.count + 1):
        best, size = float("inf"), 0.0
        for i in range(j - 1, -1, -1):
            size += sizes[i]
            best = min(best, max(ends[i], ready[j - 1]) + layers.cost(size))
        ends.append(best)
    return ends[-1]


def serial(layers: Layers, groups: Groups) -> list[tuple[float, float]]:
    """s_k = max(E_{k-1}, c_k); E_k = s_k + T(S_k)."""
    ready, spans, free = layers.ready(), [], 0.0
    for group in groups:
        start = max(free, max(ready[layer] for layer in group))
        free = start + layers.cost(sum(layers.m[layer] for layer in group))
        spans.append((start, free))
    return spans


def concurrent(layers: Layers, groups: Groups, slots: int, sigma) -> list[tuple[float, float]]:
    """Up to `slots` at once: a start-up at rate 1, then a transfer at rate 1 / sigma(k)."""
    ready = layers.ready()
    queue = [max(ready[layer] for layer in group) for group in groups]
    size = [sum(layers.m[layer] for layer in group) for group in groups]
    start: list[float] = [0.0] * len(groups)
    end: list[float] = [0.0] * len(groups)
    active: dict[int, list[float]] = {}  # left of the start-up, left of the transfer
    now, head = 0.0, 0
    while head < len(groups) or active:
        while head < len(groups) and len(active) < slots and queue[head] <= now:
            start[head] = now
            free = size[head] == 0
            active[head] = [0.0 if free else layers.a, layers.b * size[head]]
            head += 1
        moving = [i for i, left in active.items() if left[0] <= 1e-15]
        factor = sigma(len(moving)) if moving else 1.0
        steps = [left[1] * factor if i in moving else left[0] for i, left in active.items()]
        if head < len(groups) and len(active) < slots:
            steps.append(queue[head] - now)
        step = min(steps)
        for i in list(active):
            if i in moving:
                active[i][1] -= step / factor
            else:
                active[i][0] -= step
            if active[i][0] <= 1e-15 and active[i][1] <= 1e-15:
                end[i] = now + step
                del active[i]
        now += step
    return list(zip(start, end, strict=True))
