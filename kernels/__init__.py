"""What makes the forward pass fast on one kind of machine. Nothing in here changes a result."""
