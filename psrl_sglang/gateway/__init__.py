"""The gateway: an HTTP proxy in front of SGLang engines that chooses one, brings the KV there, and forwards bytes."""
