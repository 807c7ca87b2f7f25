"""What each backend takes: layouts, operators, and ranges of integers."""
