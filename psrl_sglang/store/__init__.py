"""KV pages outside the device: DRAM, disk and a remote store. Knows neither SGLang nor any server."""
