"""What a real step used: live bytes exactly, seconds, and the cost of single ops."""
