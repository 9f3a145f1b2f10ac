"""What a node decides by: pure."""
