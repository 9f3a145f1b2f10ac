"""Research: exact optima and reference tables."""
