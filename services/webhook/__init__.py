"""The mutating admission webhook: makes pods with a seat fit to be parked."""
