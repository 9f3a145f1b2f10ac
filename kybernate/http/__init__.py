"""The HTTP of every service's ports: one kind of connection, with its limits and deadlines."""
