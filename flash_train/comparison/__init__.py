"""Naive, SDPA and flash attention side by side: one process per run, files and charts at the end."""
