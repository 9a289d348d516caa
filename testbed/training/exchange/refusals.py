"""What a session refuses, in words: what was given, what is expected, what to do."""

from __future__ import annotations

from testbed.backends.protocol import Backend
from testbed.base.errors import NotDeclared, UsageError
from testbed.base.types import Op


def sparse_gradient(name: str) -> UsageError:
    """A gradient in torch's sparse layout."""
    return UsageError(
        f"gradient of {name!r} is a sparse tensor; dense ones are exchanged here; build the "
        "embedding with sparse=False"
    )


def second_gradient(name: str) -> UsageError:
    """Two backward passes that both send."""
    return UsageError(
        f"{name!r} got a second gradient before optimizer.step(); to accumulate, run all backward "
        "passes but the last inside session.accumulating(); beside a gradient scaler, which may "
        "skip a step, call session.synchronize() before it looks at the gradients"
    )


def changed_gradient(name: str) -> UsageError:
    """A gradient that clipping, a gradient scaler or the script touched while it travelled."""
    return UsageError(
        f"gradient of {name!r} was changed before it was the mean over the workers; what changes "
        "gradients (clipping, a gradient scaler's unscale_() or step()) comes after the exchange; "
        "call session.synchronize() first"
    )


def closure_refused() -> UsageError:
    """`optimizer.step(closure)`: its gradients would come after the exchange."""
    return UsageError(
        "optimizer.step() was given a closure, whose gradients would come too late for the "
        "exchange; compute the loss and call backward() before, then step() without arguments"
    )


def never_exchanged(name: str) -> UsageError:
    """Of a parameter that was not the model's, or frozen, when the session was built."""
    return UsageError(
        f"{name} has a gradient that is never exchanged: it did not require gradients, or was not "
        "the model's, when the session was built; unfreeze and add all parameters before, or close "
        "the session and build another one"
    )


def halves_refused(scheduler: str) -> NotDeclared:
    """A plan in two halves on a backend without them."""
    return NotDeclared(
        f"scheduler {scheduler!r} sends gradients in two halves, which this backend cannot (or, "
        "with update=server, must not); use update=worker or another scheduler"
    )


def unused_on_server(name: str, step: int) -> UsageError:
    """What is wrong with an unused parameter where servers run the optimizer."""
    return UsageError(
        f"{name!r} got no gradient in step {step}; a server that runs the optimizer would still "
        "apply momentum and weight decay to it; use update=worker"
    )


def read_unseen(name: str, scheduler: str) -> UsageError:
    """A parameter that was read while its update was pending, so that its value was too old."""
    return UsageError(
        f"{name!r} was read before its update although its layer was not called; scheduler "
        f"{scheduler!r} updates a layer when it is called; call the layer instead of reading its "
        "parameters, call session.flush() before, or use a scheduler that does not cross the "
        "iteration (wfbp, mg-wfbp, optimal)"
    )


def changed_setting(key: str, before: object, now: object) -> UsageError:
    """A setting of the optimizer that changed while parameters were being updated."""
    return UsageError(
        f"the optimizer's {key!r} was changed from {before} to {now} between backward() and "
        "step(), and parameters whose gradients are released have been updated by then; change "
        "settings before backward() or after step()"
    )


def released_early(what: str) -> UsageError:
    """Something that looks at all gradients, where each is freed as its parameter is updated."""
    return UsageError(
        f"{what}, but memory strategy 'release' frees each gradient and updates its parameter as "
        "the mean arrives; do without the one or the other"
    )


def refuse_release(backend: Backend, check_finite: bool) -> None:
    """What gradients cannot be released beside.

    Raises:
        UsageError: a gradient scaler, or servers that run the optimizer.
    """
    if Op.APPLY in backend.capabilities.ops:
        raise released_early("with update=server the optimizer is on the servers")
    if not check_finite:
        raise released_early("check_finite is off for a gradient scaler, which skips whole steps")
