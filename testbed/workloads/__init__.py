"""Workloads by name, and models of users."""
