"""Answers kubelet's probes for an engine that stands still. Standard library only: one runs beside every engine."""
