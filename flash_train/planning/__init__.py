"""What flash-plan asks, finds and draws: which sequence lengths and batches fit a GPU that need not be there."""
