"""Answers kubelet's probes for a parked engine. Standard library only: one instance runs beside every engine."""
