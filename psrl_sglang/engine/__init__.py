"""What runs inside SGLang's own processes. The only package here that imports sglang."""
