"""One step seen whole: on fake tensors before training, or as it runs."""
