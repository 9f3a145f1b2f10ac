"""The router: holds requests for parked models, asks for their activation, streams their answers."""
