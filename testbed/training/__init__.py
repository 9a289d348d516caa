"""Where workload, backend, schedule and compressor meet: one trainer for all of them."""
