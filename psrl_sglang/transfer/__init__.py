"""Moving KV between engines: wire messages, the worker of a rank, transports. Imports no engine."""
