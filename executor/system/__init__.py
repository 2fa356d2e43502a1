"""What every room uses: files and locks, output, processes, and what this machine has."""
