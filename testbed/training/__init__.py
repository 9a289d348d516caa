"""Where workload, backend and (later) schedule and compressor meet: one trainer for all of them."""
