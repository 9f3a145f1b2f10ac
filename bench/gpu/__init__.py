"""Parking on one NVIDIA GPU, measured through the checkpointer's own code: ``python -m bench.gpu``
(docs/dev/gpu-bench).

``harness`` parks and activates as the checkpointer does, ``target`` is what is parked, ``bare`` the driver calls alone,
``cases`` and ``hazards`` what is tried, ``report`` the tables.
"""
