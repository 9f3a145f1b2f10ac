"""Names of what the cluster bus stores."""

EVENTS = "KYB_EVENTS"
"""Stream of everything under ``kyb.v1.evt``, 7 days."""
AUDIT = "KYB_AUDIT"
"""Stream of everything under ``kyb.v1.audit``, 90 days."""
BUCKETS = ("kyb_seats", "kyb_inventory")
"""Levels by key."""
