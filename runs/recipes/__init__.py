"""The project's own sweeps: each module's `recipe()` returns one."""
