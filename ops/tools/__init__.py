"""Code behind commands of dflow that no op uses."""
