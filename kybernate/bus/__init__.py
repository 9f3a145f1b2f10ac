"""The bus of a cluster (``nats``) and of a node (``node_socket``). Nothing outside this package imports nats-py."""
