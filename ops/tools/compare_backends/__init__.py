"""`dflow doctor --backends`: whether transformers and SGLang give the same hidden states."""
