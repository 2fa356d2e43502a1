"""Compiled code: C libraries, torch.compile for changing sizes, and copies to the device."""
