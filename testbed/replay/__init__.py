"""Recorded workloads trained again: real gradients, and compute that is spent as waiting."""
