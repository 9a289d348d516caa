"""What exists because machines are shared: steal time, steady steps, rehearsed steps, reruns."""
