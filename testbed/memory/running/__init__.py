"""What carries a plan out while the model trains."""
