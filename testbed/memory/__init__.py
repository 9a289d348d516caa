"""Memory strategies: what a worker keeps while it trains, and what it frees or moves."""
