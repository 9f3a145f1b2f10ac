"""The HTTP/1.1 of a port, from its bytes on."""
