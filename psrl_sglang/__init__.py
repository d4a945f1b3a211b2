"""psrl_sglang: a weight-versioned KV cache for agentic RL on SGLang."""

__version__ = "0.1.0"
