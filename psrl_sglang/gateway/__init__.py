"""The gateway: a proxy in front of engines that chooses one, brings the KV there, and forwards bytes."""
