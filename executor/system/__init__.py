"""Shared by all rooms: files and locks, output, processes, and this machine's hardware."""
