"""Starting the ranks of a job, and joining one that was started."""
