"""What decides: pure, without I/O, clock and log."""
