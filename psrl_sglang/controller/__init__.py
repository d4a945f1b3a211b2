"""Who is there, who holds what, and moves on request: HTTP and ZMQ, never on the path of the data."""
