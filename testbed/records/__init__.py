"""What a run leaves behind: named schemas, readable without torch."""
