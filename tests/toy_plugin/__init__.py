"""What somebody else would write to add a backend and a workload of their own."""
