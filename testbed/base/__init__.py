"""Types and readers that every other package may import: no torch, no communication."""
