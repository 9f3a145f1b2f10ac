"""Benchmarks: ``make bench`` runs them all; each file's ``run()`` gives its figures by name."""
